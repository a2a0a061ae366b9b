"""The figures of a precision plan: what modules would lose, and the loss scales that keep gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ampscope.analysis.precision.plan import Plan
from ampscope.analysis.precision.plan_modules import FormatLoss, ModulePlan
from ampscope.analysis.scale.window import GradientWindow, ScaleWindow
from ampscope.analysis.words import in_words, power_of_two
from ampscope.report.figures.axis import Axis
from ampscope.report.numbers import count, share
from ampscope.report.precision_words import SHARES, head, is_overflow_seen, shares

#: Modules that are drawn.
_MOST_ROWS = 100
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
class FormatCell:
    """A module in a format."""

    number: str  #: the share that decides; empty where nothing is lost
    words: str  #: what it is a share of
    kind: str  #: as in `KEY`
    weight: float  #: how dark it is, from 0 to 1
    hover: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRow:
    """A module's row in the matrix of a precision plan."""

    name: str  #: empty for the model itself
    kind: str  #: its class
    cells: tuple[FormatCell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMatrix:
    """The matrix of a precision plan, modules by formats, ready to be painted."""

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

    def unfit(at: int) -> tuple[int, int]:
        up = [name for name in names if modules[at].formats[name].fits is False]
        return -sum(is_overflow_seen(modules[at], name) for name in up), -len(up)

    ranked = sorted(range(len(modules)), key=unfit)
    return [modules[at] for at in sorted(ranked[:_MOST_ROWS])]


def _row(module: ModulePlan, names: Sequence[str]) -> MatrixRow:
    return MatrixRow(
        name=module.module,
        kind=module.module_type,
        cells=tuple(_cell(module, name) for name in names),
    )


def _cell(module: ModulePlan, name: str) -> FormatCell:
    loss = module.formats[name]
    hover = _hover(module, loss, name)
    if loss.fits is None:
        return FormatCell(number="", words="not measured", kind="unknown", weight=0.0, hover=hover)
    if not loss.fits and is_overflow_seen(module, name):
        return FormatCell(number="", words="overflowed", kind="up", weight=_DARKEST, hover=hover)
    part: float = getattr(loss, loss.decides) if loss.decides else 0.0
    weight = _CALM if loss.fits else _LEAST + (_DARKEST - _LEAST) * math.sqrt(part)
    number, words = (share(part), _SHORT[loss.decides]) if loss.decides else ("", "fits")
    return FormatCell(number=number, words=words, kind="fits" if loss.fits else "up", weight=weight, hover=hover)


def _hover(module: ModulePlan, loss: FormatLoss, name: str) -> str:
    """Every share of it, and how many tensors they are of."""
    told = ", ".join(f"{words} {part}" for words, part in zip(SHARES.values(), shares(loss), strict=True))
    seen = " and ".join((count(module.tensors, "tensor"), count(module.gradients, "gradient")))
    overflowed = "; overflowed in float16 as the run was" if is_overflow_seen(module, name) else ""
    return f"{head(name)}: {told}; of {seen}{overflowed}"


#: Bars that are drawn, besides that of all gradients together.
_MOST_BARS = 40
#: Powers of two left free on either side, and those between two labels.
_MARGIN = 2
_STRIDES = (1, 2, 4, 8, 16)
_LABELS = 10
_ALL = "all gradients together"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleBar:
    """From the smallest scale that saves a gradient to the largest at which it does not overflow, as powers of two."""

    name: str
    low: float
    high: float
    is_open_low: bool  #: the smallest is not known, so the bar goes to the edge
    is_open_high: bool
    kind: str  #: ``holds``, ``missed`` where the scale used lies beside it, ``none`` where no scale would do
    words: str  #: what stands beside it
    hover: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleBars:
    """The bars below each other, on one axis of powers of two."""

    label: str
    axis: Axis
    bars: tuple[ScaleBar, ...]
    used: float | None  #: the scale used, as a power of two
    used_words: str
    left_out: str  #: bars that are not drawn, and gradients that need none, in words
    caption: str = (
        "loss scale, in powers of two; a bar: from the smallest scale that saves the gradient to the largest at which "
        "it does not overflow"
    )


def scale_bars(window: ScaleWindow, used: float | None) -> ScaleBars | None:
    """The picture of ``window``; None where no gradient passes half precision and was counted.

    Args:
        window: The scales at which the gradients fit.
        used: The loss scale in use; None without one.
    """
    asked = [one for one in window.parameters if one.passes_half and (one.low is not None or one.high is not None)]
    if not asked:
        return None
    axis = _axis(window, asked, used)
    bars = sorted((_bar(one, axis, used) for one in asked), key=lambda bar: _URGENCY.index(bar.kind))
    whole = _made(_ALL, window.low, window.high, axis, used, exact=window.exact)
    return ScaleBars(
        label="The loss scales at which each parameter's gradient fits float16.",
        axis=axis,
        bars=(whole, *bars[:_MOST_BARS]),
        used=None if not used else math.log2(used),
        used_words="" if not used else f"the scale used: {in_words(used)}",
        left_out="; ".join(_left_out(window, len(bars))),
    )


_URGENCY = ("none", "missed", "holds")


def _left_out(window: ScaleWindow, drawn: int) -> Iterator[str]:
    if drawn > _MOST_BARS:
        yield f"{count(drawn - _MOST_BARS, 'more parameter')} not shown"
    if zeros := sum(one.passes_half and one.low is None and one.high is None for one in window.parameters):
        yield f"of {count(zeros, 'parameter')} all that was counted was zero"
    if wide := sum(not one.passes_half for one in window.parameters):
        yield f"{count(wide, 'gradient')} passing no float16 fit at any scale"
    if window.unmeasured:
        yield f"those of {count(window.unmeasured, 'parameter')} were not measured"


def _axis(window: ScaleWindow, asked: Sequence[GradientWindow], used: float | None) -> Axis:
    ends = [end for one in asked for end in (one.low, one.high)] + [window.low, window.high, used]
    powers = [math.log2(end) for end in ends if end]
    low, high = math.floor(min(powers)) - _MARGIN, math.ceil(max(powers)) + _MARGIN
    stride = next((stride for stride in _STRIDES if (high - low) / stride <= _LABELS), _STRIDES[-1])
    ticks = [power for power in range(low + 1, high) if power % stride == 0]
    return Axis(low=low, high=high, ticks=tuple(ticks), labels=tuple(map(power_of_two, ticks)))


def _bar(one: GradientWindow, axis: Axis, used: float | None) -> ScaleBar:
    facts = [f"exactly zero: {share(one.zero_share)}"]
    if one.subnormal_share is not None:
        facts.append(f"subnormal at the scale it had: {share(one.subnormal_share)}")
    return _made(one.parameter, one.low, one.high, axis, used, exact=one.exact, more=", ".join(facts))


def _made(
    name: str,
    low: float | None,
    high: float | None,
    axis: Axis,
    used: float | None,
    *,
    exact: bool,
    more: str = "",
) -> ScaleBar:
    least = "" if exact else "at least "
    ends = (
        "its smallest is not known" if low is None else f"from {least}{in_words(low)}",
        "its largest is not known" if high is None else f"up to {in_words(high)}",
    )
    kind, words = _judged(low, high, used)
    return ScaleBar(
        name=name,
        low=axis.low if low is None else math.log2(low),
        high=axis.high if high is None else math.log2(high),
        is_open_low=low is None or not exact,
        is_open_high=high is None,
        kind=kind,
        words=words,
        hover="; ".join(filter(None, (", ".join(ends), words, more))),
    )


def _judged(low: float | None, high: float | None, used: float | None) -> tuple[str, str]:
    """Whether the scale used does for a gradient."""
    if low is not None and high is not None and low > high:
        return "none", "no scale keeps all of it"
    if used and low is not None and used < low:
        return "missed", "a larger scale would keep more of it"
    if used and high is not None and used > high:
        return "missed", "may overflow at the scale used"
    return "holds", ""
