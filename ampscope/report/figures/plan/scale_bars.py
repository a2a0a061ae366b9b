"""The loss scales at which each gradient fits float16, as bars against the scale that is used."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ampscope.analysis.scale.window import GradientWindow, ScaleWindow
from ampscope.analysis.words import in_words, power_of_two
from ampscope.report.figures.axis import Axis
from ampscope.report.numbers import count, share

#: Bars that are drawn, besides that of all gradients together.
_MOST = 40
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
        bars=(whole, *bars[:_MOST]),
        used=None if not used else math.log2(used),
        used_words="" if not used else f"the scale used: {in_words(used)}",
        left_out="; ".join(_left_out(window, len(bars))),
    )


_URGENCY = ("none", "missed", "holds")


def _left_out(window: ScaleWindow, drawn: int) -> Iterator[str]:
    if drawn > _MOST:
        yield f"{count(drawn - _MOST, 'more parameter')} not shown"
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
