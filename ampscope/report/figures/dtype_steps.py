"""What the ops of each traced step ran in: a column a step, its parts the shares of the dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ampscope.analysis.precision.over_steps import DtypeChange, PrecisionOverSteps
from ampscope.report.figures.precision_bars import dtype_rank
from ampscope.report.numbers import count, share
from ampscope.report.palette import dtype_color
from ampscope.report.wording.precision_words import change_words

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
class Mark:
    """A column in which modules go over to another dtype."""

    column: int
    hover: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeSteps:
    """The figure."""

    layers: tuple[Layer, ...]  #: the lowest first
    steps: tuple[int, ...]  #: of each column, a step that it stands for
    ticks: tuple[tuple[int, str], ...]  #: columns with the words below them
    marks: tuple[Mark, ...]
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


def _marks(seen: PrecisionOverSteps, bounds: Sequence[tuple[int, int]]) -> Iterator[Mark]:
    """One for each column with changes."""
    found: dict[int, list[DtypeChange]] = {}
    places = {step: at for at, step in enumerate(seen.steps)}
    for change in seen.changes:
        found.setdefault(_column_of(places[change.step], bounds), []).append(change)
    for column, changes in found.items():
        more = f"; and {len(changes) - 1:,} more" if len(changes) > 1 else ""
        yield Mark(column=column, hover=f"{change_words(changes[0])}{more}")


def _column_of(place: int, bounds: Sequence[tuple[int, int]]) -> int:
    return next(at for at, (first, end) in enumerate(bounds) if first <= place < end)


def _ticks(steps: Sequence[int]) -> Iterator[tuple[int, str]]:
    every = max(1, -(-len(steps) // _LABELS))
    for at in range(0, len(steps), every):
        yield at, count(steps[at])
