"""The figure of a precision plan: modules by formats, each cell the share that decides there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ampscope.analysis.precision.plan import Plan
from ampscope.analysis.precision.plan_modules import FormatLoss, ModulePlan
from ampscope.report.numbers import count, share
from ampscope.report.wording.plan_words import SHARES, head, is_overflow_seen, shares

#: Modules that are drawn.
_MOST = 100
#: How dark a cell is: of a module that fits, and of one that does not, from a share of nothing to one of all.
_CALM, _LEAST, _DARKEST = 0.14, 0.2, 0.5
#: What decides, in few letters; a share of the gradients' mass has a sign of its own.
_GRADIENT = "\N{NABLA}"
_SHORT = {
    "overflow_share": "overflow",
    "lost_share": "flushed",
    "subnormal_share": "subnormal",
    "gradient_overflow_share": f"{_GRADIENT} overflow",
    "gradient_lost_share": f"{_GRADIENT} flushed",
    "gradient_subnormal_share": f"{_GRADIENT} subnormal",
}
#: What a colour stands for, by the name of its class, in the order of the key.
KEY = {"fits": "may go that low", "up": "should stay above it", "unknown": "values not measured"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A module in a format."""

    number: str  #: the share that decides; empty where nothing is lost
    words: str  #: what it is a share of
    kind: str  #: as in `KEY`
    weight: float  #: how dark it is, from 0 to 1
    hover: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRow:
    """A module."""

    name: str  #: empty for the model itself
    kind: str  #: its class
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMatrix:
    """The figure."""

    label: str
    columns: tuple[str, ...]
    rows: tuple[MatrixRow, ...]
    left_out: str  #: modules that are not drawn, in words
    key: tuple[tuple[str, str], ...]  #: class and words of what occurs in it
    unit: str = f"share of the values that would be lost or lose bits; {_GRADIENT}: of the gradients' mass"


def plan_matrix(plan: Plan, names: Sequence[str]) -> PlanMatrix:
    """The modules of ``plan`` in the formats ``names``; of very many those first that do not fit one of them."""
    drawn = _most_telling(plan.modules, names)
    rows = tuple(_row(module, names) for module in drawn)
    occurring = {cell.kind for row in rows for cell in row.cells}
    left_out = len(plan.modules) - len(drawn)
    return PlanMatrix(
        label="What each module would lose in each format.",
        columns=tuple(map(head, names)),
        rows=rows,
        left_out=f"{count(left_out, 'more module')} that would lose no more" if left_out else "",
        key=tuple((kind, words) for kind, words in KEY.items() if kind in occurring),
    )


def _most_telling(modules: Sequence[ModulePlan], names: Sequence[str]) -> list[ModulePlan]:
    """As many as there is room for, in their order."""

    def unfit(at: int) -> tuple[int, int]:
        up = [name for name in names if modules[at].formats[name].fits is False]
        return -sum(is_overflow_seen(modules[at], name) for name in up), -len(up)

    ranked = sorted(range(len(modules)), key=unfit)
    return [modules[at] for at in sorted(ranked[:_MOST])]


def _row(module: ModulePlan, names: Sequence[str]) -> MatrixRow:
    return MatrixRow(
        name=module.module,
        kind=module.module_type,
        cells=tuple(_cell(module, name) for name in names),
    )


def _cell(module: ModulePlan, name: str) -> Cell:
    loss = module.formats[name]
    hover = _hover(module, loss, name)
    if loss.fits is None:
        return Cell(number="", words="not measured", kind="unknown", weight=0.0, hover=hover)
    if not loss.fits and is_overflow_seen(module, name):
        return Cell(number="", words="overflowed", kind="up", weight=_DARKEST, hover=hover)
    part: float = getattr(loss, loss.decides) if loss.decides else 0.0
    weight = _CALM if loss.fits else _LEAST + (_DARKEST - _LEAST) * math.sqrt(part)
    number, words = (share(part), _SHORT[loss.decides]) if loss.decides else ("", "fits")
    return Cell(number=number, words=words, kind="fits" if loss.fits else "up", weight=weight, hover=hover)


def _hover(module: ModulePlan, loss: FormatLoss, name: str) -> str:
    """Every share of it, and how many tensors they are of."""
    told = ", ".join(f"{words} {part}" for words, part in zip(SHARES.values(), shares(loss), strict=True))
    seen = " and ".join((count(module.tensors, "tensor"), count(module.gradients, "gradient")))
    overflowed = "; overflowed in float16 as the run was" if is_overflow_seen(module, name) else ""
    return f"{head(name)}: {told}; of {seen}{overflowed}"
