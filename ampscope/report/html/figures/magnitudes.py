"""Paints histograms over powers of two, with the limits of each tensor's dtype and the dtypes' ranges below."""

from __future__ import annotations

from ampscope.report.figures.axis import Axis
from ampscope.report.figures.magnitudes import Band, Bar, Histogram, Magnitudes
from ampscope.report.html.markup import as_html

#: Percent of the axis at its ends, where half of a label would lie outside.
_END = 1.5


def magnitudes_html(figure: Magnitudes | None) -> str:
    """The figure; empty without one."""
    if figure is None:
        return ""
    axis = figure.axis
    drawn = "".join(_histogram(each, axis) for each in figure.histograms)
    bands = "".join(_band(band, axis) for band in figure.bands)
    labels = "".join(_label(_at(axis, tick), label) for tick, label in zip(axis.ticks, axis.labels, strict=True))
    return (
        f'<div class="amp-magnitudes">{drawn}<div class="amp-place">{figure.left_out}</div>'
        f'<div class="amp-bands">{bands}</div><div class="amp-powers">{labels}</div>'
        f'<div class="amp-place">{figure.caption}</div></div>'
    )


def _label(at: float, words: str) -> str:
    """A power below where it stands; at an end of the axis beside that end, where all of it has room."""
    aside = "" if _END < at < 100 - _END else f";transform:translateX({0 if at <= _END else -100}%)"
    return f'<span style="left:{at:.2f}%{aside}">{words}</span>'


def _histogram(each: Histogram, axis: Axis) -> str:
    bars = "".join(_bar(bar, axis) for bar in each.bars)
    empty = f'<span class="amp-nothing">{each.empty}</span>' if each.empty else ""
    mark = "" if each.mark is None else f'<span class="amp-reach" style="left:{_at(axis, each.mark):.2f}%"></span>'
    return (
        f'<div class="amp-operand"><div class="amp-panel-name">{_title(each)}</div>'
        f'<div class="amp-histogram">{_limits(each, axis)}{bars}{empty}{mark}</div></div>'
    )


def _title(each: Histogram) -> str:
    facts = " ".join(as_html(fact, 30) for fact in each.facts)
    zeros = f", {as_html(each.zeros)}" if each.zeros else ""
    alarm = f' <span class="amp-key">and {as_html(each.nonfinite)}</span>' if each.nonfinite else ""
    mark = f' <b class="amp-reached">{as_html(each.mark_words)}</b>' if each.mark_words else ""
    return f"<b>{as_html(each.role, 60)}</b> <span class='amp-faint'>{facts}{zeros}</span>{alarm}{mark}"


def _bar(bar: Bar, axis: Axis) -> str:
    style = f"{_box(axis, bar.low, bar.high)};--part:{bar.height:.3f};background:{bar.color}"
    return f'<i style="{style}" title="{as_html(bar.hover)}"></i>'


def _limits(each: Histogram, axis: Axis) -> str:
    """What lies outside the tensor's own dtype, shaded."""
    shaded = []
    if each.vanishes_below is not None:
        box = _box(axis, axis.low, each.vanishes_below)
        shaded.append(f'<span class="amp-beyond low" style="{box}"><em>vanishes</em></span>')
    if each.overflows_above is not None:
        box = _box(axis, each.overflows_above, axis.high)
        shaded.append(f'<span class="amp-beyond high" style="{box}"><em>overflows</em></span>')
    return "".join(shaded)


def _band(band: Band, axis: Axis) -> str:
    """The range, cut to the picture."""
    normal = f"background:{band.color};color:{band.ink};{_box(axis, band.normal, band.top)}"
    pale = f"background:{band.color};{_box(axis, band.lowest, band.normal)}"
    return f'<div class="amp-band"><i class="pale" style="{pale}"></i><span style="{normal}">{band.words}</span></div>'


def _at(axis: Axis, power: float) -> float:
    """Where a power stands, in percent of the width."""
    return min(max(100 * axis.place(power), 0.0), 100.0)


def _box(axis: Axis, start: float, stop: float) -> str:
    """The style of what reaches from one power to another."""
    left = _at(axis, start)
    return f"left:{left:.2f}%;width:{_at(axis, stop) - left:.2f}%"
