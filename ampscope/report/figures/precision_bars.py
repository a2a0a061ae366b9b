"""Draws which dtypes ran where: a bar for each row, or a column for each traced step, its parts the shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ampscope.analysis.precision.over_steps import DtypeChange, PrecisionOverSteps
from ampscope.analysis.precision.precision import Precision, PrecisionRow, deepest, fold_modules
from ampscope.report.numbers import count, share, size
from ampscope.report.palette import dtype_color, ink_on
from ampscope.report.precision_words import change_words

#: Bars of a report: modules up to which they are told apart.
_REPORT_BARS = 16
#: The dtypes that stand first in every bar, the narrowest first.
_ORDER = ("float16", "bfloat16", "float32", "float64")
#: Shares below this have no room for a label.
_LABELLED = 0.12
#: What runs in no module.
_OUTSIDE = "outside modules"


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypePart:
    """One dtype's part of a bar."""

    dtype: str
    share: float
    words: str
    hover: str
    color: str
    ink: str  #: the text colour that can be read on it

    @property
    def is_labelled(self) -> bool:
        """Whether its words find room on it."""
        return self.share >= _LABELLED


@dataclass(frozen=True, slots=True)
class Bar:
    """A whole and its parts, from left to right."""

    name: str
    parts: tuple[DtypePart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareBars:
    """Bars below each other that each add up to a whole."""

    bars: tuple[Bar, ...]
    unit: str  #: what the parts are shares of
    left_out: str = ""  #: what is not drawn, in words

    @property
    def key(self) -> dict[str, str]:
        """The colour of each dtype."""
        return {part.dtype: part.color for bar in self.bars for part in bar.parts}


def step_bars(seen: Precision) -> ShareBars:
    """The whole step and its modules, joined to their ancestors where there are too many."""
    folded = fold_modules(seen.modules, deepest(seen.modules, _REPORT_BARS))
    modules = module_bars(folded, most=_REPORT_BARS)
    return ShareBars(
        bars=(Bar("the whole step", tuple(_parts(seen.total, by_bytes=False))), *modules.bars),
        unit=modules.unit,
        left_out=modules.left_out,
    )


def module_bars(rows: Sequence[PrecisionRow], *, most: int, by_bytes: bool = False) -> ShareBars:
    """A bar for each of the first ``most`` modules, in the order given."""
    return ShareBars(
        bars=tuple(Bar(row.name or _OUTSIDE, tuple(_parts(row, by_bytes=by_bytes))) for row in rows[:most]),
        unit="share of the bytes written" if by_bytes else "share of the ops",
        left_out=count(len(rows) - most, "more module") if len(rows) > most else "",
    )


def _parts(row: PrecisionRow, *, by_bytes: bool) -> Iterator[DtypePart]:
    for one in sorted(row.shares, key=lambda one: dtype_rank(one.dtype)):
        part = row.part(one.dtype, by_bytes=by_bytes)
        words = f"{one.dtype} {share(part)}"
        yield DtypePart(
            dtype=one.dtype,
            share=part,
            words=words,
            hover=f"{words}: {count(one.ops, 'op')}, {size(one.bytes)} written",
            color=dtype_color(one.dtype),
            ink=ink_on(one.dtype),
        )


def dtype_rank(dtype: str) -> tuple[int, str]:
    """Returns the sort key of a dtype: the narrowest first, then by name."""
    return (_ORDER.index(dtype) if dtype in _ORDER else len(_ORDER)), dtype


#: Columns that are drawn; of more steps neighbours share one. Labels below them.
_COLUMNS, _LABELS = 240, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One dtype in all columns."""

    dtype: str
    color: str
    shares: tuple[float, ...]  #: from 0 to 1
    hovers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeSwitch:
    """A column in which modules go over to another dtype."""

    column: int
    hover: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeSteps:
    """The figure of the dtypes over traced steps, ready to be painted."""

    layers: tuple[Layer, ...]  #: the lowest first
    steps: tuple[int, ...]  #: of each column, a step that it stands for
    ticks: tuple[tuple[int, str], ...]  #: columns with the words below them
    marks: tuple[DtypeSwitch, ...]
    chosen: int | None  #: the column of the step that is looked at
    chosen_words: str  #: what stands above it
    unit: str = "share of the ops"
    axis: str = "traced optimizer steps, in order"


def dtype_steps(seen: PrecisionOverSteps, *, chosen: int | None = None) -> DtypeSteps:
    """The picture of ``seen``.

    Args:
        seen: The ops by dtype.
        chosen: The step that is looked at.
    """
    bounds = _columns(len(seen.steps))
    steps = [seen.steps[first] for first, _ in bounds]
    return DtypeSteps(
        layers=tuple(_layers(seen, bounds)),
        steps=tuple(steps),
        ticks=tuple(_ticks(steps)),
        marks=tuple(_marks(seen, bounds)),
        chosen=_column_of(seen.steps.index(chosen), bounds) if chosen in seen.steps else None,
        chosen_words="" if chosen is None else f"step {count(chosen)}",
    )


def _columns(steps: int) -> list[tuple[int, int]]:
    """The first and one past the last of the steps of each column."""
    drawn = min(steps, _COLUMNS)
    edges = [steps * at // drawn for at in range(drawn + 1)] if drawn else []
    return list(pairwise(edges))


def _layers(seen: PrecisionOverSteps, bounds: Sequence[tuple[int, int]]) -> Iterator[Layer]:
    sums = {name: [sum(ops[first:end]) for first, end in bounds] for name, ops in seen.ops.items()}
    totals = [sum(of_dtype[at] for of_dtype in sums.values()) for at in range(len(bounds))]
    for name in sorted(sums, key=dtype_rank):
        parts = [part / total if total else 0.0 for part, total in zip(sums[name], totals, strict=True)]
        yield Layer(
            dtype=name,
            color=dtype_color(name),
            shares=tuple(round(part, 4) for part in parts),
            hovers=tuple(
                f"{_steps(seen, *bound)}: {name} {share(part)}" for bound, part in zip(bounds, parts, strict=True)
            ),
        )


def _steps(seen: PrecisionOverSteps, first: int, end: int) -> str:
    if end - first == 1:
        return f"step {count(seen.steps[first])}"
    return f"steps {count(seen.steps[first])} to {count(seen.steps[end - 1])}"


def _marks(seen: PrecisionOverSteps, bounds: Sequence[tuple[int, int]]) -> Iterator[DtypeSwitch]:
    found: dict[int, list[DtypeChange]] = {}
    places = {step: at for at, step in enumerate(seen.steps)}
    for change in seen.changes:
        found.setdefault(_column_of(places[change.step], bounds), []).append(change)
    for column, changes in found.items():
        more = f"; and {len(changes) - 1:,} more" if len(changes) > 1 else ""
        yield DtypeSwitch(column=column, hover=f"{change_words(changes[0])}{more}")


def _column_of(place: int, bounds: Sequence[tuple[int, int]]) -> int:
    return next(at for at, (first, end) in enumerate(bounds) if first <= place < end)


def _ticks(steps: Sequence[int]) -> Iterator[tuple[int, str]]:
    every = max(1, -(-len(steps) // _LABELS))
    for at in range(0, len(steps), every):
        yield at, count(steps[at])
