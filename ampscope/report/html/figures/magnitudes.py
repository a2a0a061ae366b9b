"""The magnitudes an op read and wrote, as powers of two against what each dtype can hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ampscope.analysis.numerics.dtypes import FORMATS, Format
from ampscope.analysis.results import Operand, Tried
from ampscope.report import numbers
from ampscope.report.html.figures.panels import power_of_two
from ampscope.report.html.markup import as_html
from ampscope.report.html.palette import ALARM, dtype_color, ink_on
from ampscope.report.html.phrases import count, part, trouble, value
from ampscope.trace.schema import Change

#: The dtypes that are told apart, the narrowest first.
BANDS = ("float16", "bfloat16", "float32")
#: Powers of two left free on either side.
_MARGIN = 4
_STRIDES = (4, 8, 16, 32, 64, 128, 256, 512)
_LABELS = 9
#: Tensors that are drawn; an op over a list of tensors reads hundreds.
_MOST = 6


@dataclass(frozen=True, slots=True)
class _Extent:
    """Powers of two that the picture covers."""

    low: int
    high: int

    def at(self, power: float) -> float:
        """Where a power stands, in percent of the width."""
        return min(max(100 * (power - self.low) / (self.high - self.low), 0.0), 100.0)

    def box(self, start: float, stop: float) -> str:
        """The style of what reaches from one power to another."""
        left = self.at(start)
        return f"left:{left:.2f}%;width:{self.at(stop) - left:.2f}%"


def magnitudes_html(operands: Sequence[Operand], tried: Sequence[Tried] = ()) -> str:
    """One histogram for each operand that was counted, and the dtypes' ranges below; empty when none has a value.

    Args:
        operands: What the op read and wrote.
        tried: Replays of the step: where float32 took the op's result is marked on what it wrote.
    """
    shown = [operand for operand in operands if any(operand.exp_counts) or operand.zeros or trouble(operand)]
    if not any(any(operand.exp_counts) for operand in shown):
        return ""
    reach = _reach(tried)
    extent = _extent(shown, reach)
    more = numbers.count(len(shown) - _MOST, "more tensor") if len(shown) > _MOST else ""
    drawn = "".join(
        _operand(operand, extent, reach if operand.role.startswith("output") else None) for operand in _some(shown)
    )
    bands = "".join(_band(FORMATS[name], extent) for name in BANDS)
    return (
        f'<div class="amp-magnitudes">{drawn}<div class="amp-place">{more}</div><div class="amp-bands">{bands}</div>'
        f'<div class="amp-powers">{"".join(_labels(extent))}</div>'
        '<div class="amp-place">magnitude of the values; coloured bands: what a dtype can hold, pale where it is '
        "subnormal and loses digits</div></div>"
    )


def _some(operands: Sequence[Operand]) -> list[Operand]:
    """As many as there is room for, in their order: results and what has something wrong before the others."""
    told = sorted(operands, key=lambda one: not (one.role.startswith("output") or trouble(one) or one.zeros))[:_MOST]
    return [operand for operand in operands if operand in told]


def _reach(tried: Sequence[Tried]) -> float | None:
    """The largest finite magnitude that the op at the origin gave in float32."""
    for each in tried:
        ends = [abs(end) for end in (each.op_min, each.op_max) if end is not None and math.isfinite(end)]
        if each.change == Change.FP32 and len(ends) == 2 and max(ends) > 0:
            return max(ends)
    return None


def _extent(operands: Sequence[Operand], reach: float | None) -> _Extent:
    """From the smallest to the largest magnitude, and float16's range in any case."""
    half = FORMATS["float16"]
    counted = [(operand.exp_low or 0, len(operand.exp_counts)) for operand in operands if any(operand.exp_counts)]
    highs = [low + bins for low, bins in counted] + ([math.ceil(math.log2(reach))] if reach else [])
    return _Extent(min(half.lowest, *(low for low, _ in counted)) - _MARGIN, max(half.top, *highs) + _MARGIN)


def _operand(operand: Operand, extent: _Extent, reach: float | None) -> str:
    own = FORMATS.get(operand.dtype)
    bars = "".join(_bars(operand, extent)) if any(operand.exp_counts) else _EMPTY
    limits = "".join(_limits(own, extent)) + _lost(operand, own, extent) if own else ""
    return (
        f'<div class="amp-operand"><div class="amp-panel-name">{_title(operand)}{_told(reach)}</div>'
        f'<div class="amp-histogram">{limits}{bars}{_mark(reach, extent) if reach else ""}</div></div>'
    )


_EMPTY = '<span class="amp-nothing">no finite value other than 0</span>'


def _title(operand: Operand) -> str:
    facts = " ".join(as_html(each, 30) for each in (operand.dtype, operand.shape) if each)
    wrong = trouble(operand)
    alarm = f' <span class="amp-key">and {as_html(wrong)}</span>' if wrong else ""
    zeros = f", {as_html(part(operand.zeros, operand.numel))} exactly zero" if operand.zeros else ""
    return f"<b>{as_html(operand.role, 60)}</b> <span class='amp-faint'>{facts}{zeros}</span>{alarm}"


def _bars(operand: Operand, extent: _Extent) -> Iterator[str]:
    total, most = sum(operand.exp_counts), max(operand.exp_counts)
    color = dtype_color(operand.dtype)
    for power, number in enumerate(operand.exp_counts, start=operand.exp_low or 0):
        if number:
            told = (
                f"{power_of_two(power)} to {power_of_two(power + 1)}: {count(number)} elements, {part(number, total)}"
            )
            height = max(100 * number / most, 1.5)
            yield _bar(extent, power, height, color, told)


def _bar(extent: _Extent, power: int, height: float, color: str, told: str) -> str:
    style = f"{extent.box(power + 0.06, power + 0.94)};--part:{height / 100:.3f};background:{color}"
    return f'<i style="{style}" title="{told}"></i>'


def _lost(operand: Operand, own: Format, extent: _Extent) -> str:
    """What became infinite, beyond the largest number."""
    infinite = (operand.posinf or 0) + (operand.neginf or 0)
    if not infinite or own.top >= extent.high:
        return ""
    height = max(100 * infinite / max(operand.exp_counts, default=1), 12)
    return _bar(extent, own.top, min(height, 100), ALARM, f"{count(infinite)} elements became infinite")


def _limits(own: Format, extent: _Extent) -> Iterator[str]:
    """What lies outside the operand's own dtype, shaded."""
    if own.lowest > extent.low:
        yield f'<span class="amp-beyond low" style="{extent.box(extent.low, own.lowest)}"><em>vanishes</em></span>'
    if own.top < extent.high:
        yield f'<span class="amp-beyond high" style="{extent.box(own.top, extent.high)}"><em>overflows</em></span>'


def _told(reach: float | None) -> str:
    return f' <b class="amp-reached">in float32 this op reaches {as_html(value(reach))}</b>' if reach else ""


def _mark(reach: float, extent: _Extent) -> str:
    return f'<span class="amp-reach" style="left:{extent.at(math.log2(reach)):.2f}%"></span>'


def _band(own: Format, extent: _Extent) -> str:
    """A dtype's normal range in full colour and its subnormal range paler, cut to the picture."""
    color, ink = dtype_color(own.name), ink_on(own.name)
    normal = f"background:{color};color:{ink};{extent.box(own.normal, own.top)}"
    pale = f"background:{color};{extent.box(own.lowest, own.normal)}"
    words = f"{own.name}, normal from {power_of_two(own.normal)} to {power_of_two(own.top)}"
    return f'<div class="amp-band"><i class="pale" style="{pale}"></i><span style="{normal}">{words}</span></div>'


def _labels(extent: _Extent) -> Iterator[str]:
    reach = extent.high - extent.low
    stride = next((stride for stride in _STRIDES if reach / stride <= _LABELS), _STRIDES[-1])
    for power in range(extent.low, extent.high + 1):
        if power % stride == 0:
            yield f'<span style="left:{extent.at(power):.2f}%">{power_of_two(power)}</span>'
