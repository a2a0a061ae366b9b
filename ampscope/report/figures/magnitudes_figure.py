"""The magnitudes an op read and wrote, as powers of two against what each dtype can hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ampscope.analysis.results import Operand, Tried
from ampscope.analysis.words import power_of_two
from ampscope.report.figures.axis import Axis
from ampscope.report.numbers import count, nonfinite, part, value
from ampscope.report.palette import ALARM, dtype_color, ink_on
from ampscope.trace.dtypes import FINFO, FloatInfo
from ampscope.trace.schema import Change

#: The dtypes whose ranges are shown, the narrowest first.
BANDS = ("float16", "bfloat16", "float32")
WITH_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", *BANDS)
#: What the figure shows, for those who do not see it.
LABEL = "How many values lie between two powers of two, against what each dtype can hold."
#: Powers of two left free on either side.
_MARGIN = 4
#: Powers of two between two labels, the smallest that leaves at most `_LABELS`.
_STRIDES = (4, 8, 16, 32, 64, 128, 256, 512)
_LABELS = 9
#: Tensors that are drawn; an op over a list of tensors reads hundreds.
_MOST = 6
#: The least height of a bar, of one for values that became infinite, and the air between two bars, in powers.
_LEAST, _LEAST_LOST, _AIR = 0.015, 0.12, 0.06


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramBar:
    """How many values lie between two powers of two, as a share of the fullest such bar."""

    low: float
    high: float
    height: float
    color: str
    hover: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHistogram:
    """One tensor's magnitudes."""

    role: str
    facts: tuple[str, ...]  #: dtype and shape
    zeros: str = ""  #: how many values are zero, in words
    nonfinite: str = ""  #: what is not finite, in words
    bars: tuple[HistogramBar, ...] = ()
    empty: str = ""  #: what stands there instead of bars
    vanishes_below: float | None = None  #: where its dtype ends, if that is inside the picture
    overflows_above: float | None = None
    mark: float | None = None  #: a power to be marked
    mark_words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeBand:
    """A dtype's normal range and, paler, its subnormal one."""

    words: str
    color: str
    ink: str
    lowest: int
    normal: int
    top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MagnitudesFigure:
    """Histograms below each other on one axis of powers of two, and the dtypes' ranges at the foot."""

    axis: Axis
    histograms: tuple[TensorHistogram, ...]
    bands: tuple[DtypeBand, ...]
    left_out: str  #: tensors that are not drawn, in words
    caption: str = (
        "magnitude of the values; coloured bands: what a dtype can hold, pale where it is subnormal and loses digits"
    )


def magnitudes(
    operands: Sequence[Operand], tried: Sequence[Tried] = (), *, bands: Sequence[str] = BANDS
) -> MagnitudesFigure | None:
    """One histogram for each operand that was counted; None when none has a value.

    Args:
        operands: What the op read and wrote.
        tried: Replays of the step: where float32 took the op's result is marked on what it wrote.
        bands: The dtypes whose ranges are shown.
    """
    shown = [operand for operand in operands if any(operand.exp_counts) or _stands_out(operand)]
    if not any(any(operand.exp_counts) for operand in shown):
        return None
    reach = _reach(tried)
    axis = _axis(shown, reach)
    results = [each for each in shown if _is_result(each)]
    reaching = [each for each in results if nonfinite(each)] or results
    return MagnitudesFigure(
        axis=axis,
        histograms=tuple(_histogram(each, axis, reach if each in reaching else None) for each in _most_telling(shown)),
        bands=tuple(_band(FINFO[name]) for name in bands),
        left_out=count(len(shown) - _MOST, "more tensor") if len(shown) > _MOST else "",
    )


def _stands_out(operand: Operand) -> bool:
    return bool(nonfinite(operand) or operand.statistics.zeros)


def _is_result(operand: Operand) -> bool:
    return operand.role.startswith("output")


def _most_telling(operands: Sequence[Operand]) -> list[Operand]:
    """Chooses as many operands as there is room for, in their order: results and those with something wrong first."""
    ranked = sorted(operands, key=lambda one: not (_is_result(one) or _stands_out(one)))[:_MOST]
    return [operand for operand in operands if operand in ranked]


def _reach(tried: Sequence[Tried]) -> float | None:
    """The largest finite magnitude that the op at the origin gave in float32."""
    for each in tried:
        ends = [abs(end) for end in (each.op_min, each.op_max) if end is not None and math.isfinite(end)]
        if each.change == Change.FP32 and len(ends) == 2 and max(ends) > 0:
            return max(ends)
    return None


def _axis(operands: Sequence[Operand], reach: float | None) -> Axis:
    """From the smallest to the largest magnitude, and float16's range in any case."""
    half = FINFO["float16"]
    drawn = [operand for operand in operands if any(operand.exp_counts)]
    counted = [(operand.statistics.exp_low or 0, len(operand.exp_counts)) for operand in drawn]
    highs = [low + bins for low, bins in counted] + ([math.ceil(math.log2(reach))] if reach else [])
    low = min(half.lowest, *(low for low, _ in counted)) - _MARGIN
    high = max(half.top, *highs) + _MARGIN
    stride = next((stride for stride in _STRIDES if (high - low) / stride <= _LABELS), _STRIDES[-1])
    powers = [power for power in range(low, high + 1) if power % stride == 0]
    return Axis(low=low, high=high, ticks=tuple(powers), labels=tuple(map(power_of_two, powers)))


def _histogram(operand: Operand, axis: Axis, reach: float | None) -> TensorHistogram:
    own = FINFO.get(operand.dtype)
    counted = any(operand.exp_counts)
    return TensorHistogram(
        role=operand.role,
        facts=tuple(each for each in (operand.dtype, operand.shape) if each),
        zeros=f"{part(operand.statistics.zeros, operand.numel)} exactly zero" if operand.statistics.zeros else "",
        nonfinite=nonfinite(operand),
        bars=(*(_became_infinite(operand, own, axis) if own else ()), *(_bars(operand) if counted else ())),
        empty="" if counted else "no finite value other than 0",
        vanishes_below=own.lowest if own and own.lowest > axis.low else None,
        overflows_above=own.top if own and own.top < axis.high else None,
        mark=math.log2(reach) if reach else None,
        mark_words=f"in float32 this op reaches {value(reach)}" if reach else "",
    )


def _bars(operand: Operand) -> Iterator[HistogramBar]:
    total, most = sum(operand.exp_counts), max(operand.exp_counts)
    for power, number in enumerate(operand.exp_counts, start=operand.statistics.exp_low or 0):
        if number:
            between = f"{power_of_two(power)} to {power_of_two(power + 1)}"
            hover = f"{between}: {count(number, 'element')}, {part(number, total)}"
            yield _bar(power, max(number / most, _LEAST), dtype_color(operand.dtype), hover)


def _became_infinite(operand: Operand, own: FloatInfo, axis: Axis) -> Iterator[HistogramBar]:
    """Yields the bar of the elements that became infinite, beyond the largest number."""
    infinite = (operand.statistics.posinf or 0) + (operand.statistics.neginf or 0)
    if infinite and own.top < axis.high:
        height = max(infinite / max(operand.exp_counts, default=1), _LEAST_LOST)
        yield _bar(own.top, min(height, 1.0), ALARM, f"{count(infinite, 'element')} became infinite")


def _bar(power: int, height: float, color: str, hover: str) -> HistogramBar:
    return HistogramBar(low=power + _AIR, high=power + 1 - _AIR, height=height, color=color, hover=hover)


def _band(own: FloatInfo) -> DtypeBand:
    return DtypeBand(
        words=f"{own.name}, normal from {power_of_two(own.normal)} to {power_of_two(own.top)}",
        color=dtype_color(own.name),
        ink=ink_on(own.name),
        lowest=own.lowest,
        normal=own.normal,
        top=own.top,
    )
