"""Paints ranges of loss scales as bars, with a line through all of them at the scale that is used."""

from __future__ import annotations

from ampscope.report.figures.axis import Axis
from ampscope.report.figures.plan.scale_bars import ScaleBar, ScaleBars
from ampscope.report.html.markup import as_html


def scale_bars_html(figure: ScaleBars | None) -> str:
    """The figure; nothing without one."""
    if figure is None:
        return ""
    axis = figure.axis
    line = "" if figure.used is None else f'<i class="used" style="left:{_at(axis, figure.used):.2f}%"></i>'
    rows = "".join(_row(bar, axis, line) for bar in figure.bars)
    ticks = "".join(
        f'<span style="left:{_at(axis, tick):.2f}%">{label}</span>'
        for tick, label in zip(axis.ticks, axis.labels, strict=True)
    )
    used = f'<div class="amp-place"><i class="amp-used"></i>{as_html(figure.used_words)}</div>' if line else ""
    left_out = f"; {as_html(figure.left_out)}" if figure.left_out else ""
    return (
        f'<figure class="amp-windows" aria-label="{as_html(figure.label)}">{used}{rows}'
        f'<div class="amp-window"><b></b><div class="amp-powers">{ticks}</div></div>'
        f'<figcaption class="amp-place">{as_html(figure.caption)}{left_out}</figcaption></figure>'
    )


def _row(bar: ScaleBar, axis: Axis, line: str) -> str:
    left, right = sorted((_at(axis, bar.low), _at(axis, bar.high)))
    kinds = " ".join((bar.kind, *["open-low"] * bar.is_open_low, *["open-high"] * bar.is_open_high))
    place = f"left:{left:.2f}%;width:{max(right - left, 0.4):.2f}%"
    words = f"<small>{as_html(bar.words)}</small>" if bar.words else ""
    name = as_html(bar.name, 60).replace(".", ".<wbr>")
    return (
        f'<div class="amp-window" title="{as_html(f"{bar.name}: {bar.hover}")}"><b>{name}{words}</b>'
        f'<div class="amp-track"><i class="{kinds}" style="{place}"></i>{line}</div></div>'
    )


def _at(axis: Axis, power: float) -> float:
    """Where a power stands, in percent of the width."""
    return min(max(100 * axis.place(power), 0.0), 100.0)
