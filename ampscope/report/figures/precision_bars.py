"""What ran in which dtype: a bar for each row, its parts the shares of the ops or of the bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ampscope.analysis.precision.precision import Precision, PrecisionRow, deepest, fold_modules
from ampscope.report.numbers import count, share, size
from ampscope.report.palette import dtype_color, ink_on

#: Bars of a report: modules up to which they are told apart.
_REPORT_BARS = 16
#: The dtypes that stand first in every bar, the narrowest first.
_ORDER = ("float16", "bfloat16", "float32", "float64")
#: Shares below this have no room for a label.
_LABELLED = 0.12
#: What runs in no module.
_OUTSIDE = "outside modules"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
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
    parts: tuple[Part, ...]


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


def _parts(row: PrecisionRow, *, by_bytes: bool) -> Iterator[Part]:
    for one in sorted(row.shares, key=lambda one: dtype_rank(one.dtype)):
        part = row.part(one.dtype, by_bytes=by_bytes)
        words = f"{one.dtype} {share(part)}"
        yield Part(
            dtype=one.dtype,
            share=part,
            words=words,
            hover=f"{words}: {count(one.ops, 'op')}, {size(one.bytes)} written",
            color=dtype_color(one.dtype),
            ink=ink_on(one.dtype),
        )


def dtype_rank(dtype: str) -> tuple[int, str]:
    """Where a dtype stands among others: the narrowest first, then by name."""
    return (_ORDER.index(dtype) if dtype in _ORDER else len(_ORDER)), dtype
