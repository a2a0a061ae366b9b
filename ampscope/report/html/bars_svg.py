"""Paints bars and grids: shares of a whole, ranges of loss scales, modules by formats, ranks by steps."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

from ampscope.report.figures.axis import Axis
from ampscope.report.figures.plan_figures import FormatCell, MatrixRow, PlanMatrix, ScaleBar, ScaleBars
from ampscope.report.figures.precision_bars import Bar, DtypePart, DtypeSteps, ShareBars
from ampscope.report.figures.step_figures import CellStretch, GridRow, RankGrid
from ampscope.report.html.markup import as_html, labels_html, link_html
from ampscope.report.precision_words import module_words
from ampscope.report.safe_text import short


def share_bars_html(figure: ShareBars, *, links: Sequence[str] = ()) -> str:
    """The figure; the name of each bar leads to one of ``links``, where they are given."""
    leading = [*links, *[""] * len(figure.bars)]
    bars = "".join(map(_bar, figure.bars, leading))
    left_out = f"; {figure.left_out} not shown" if figure.left_out else ""
    key = _dtypes_key(figure.key)
    return f'<div class="amp-shares">{bars}</div><div class="amp-place">{figure.unit}{left_out}</div>{key}'


def _dtypes_key(colors: Mapping[str, str], more: str = "") -> str:
    return _key("style", [(f"background:{color}", short(dtype, 24)) for dtype, color in colors.items()], more)


def _key(attribute: str, colors: Iterable[tuple[str, str]], more: str = "") -> str:
    """Says what colours stand for; ``attribute`` of an element gives it a colour."""
    named = "".join(f'<span><i {attribute}="{color}"></i>{as_html(words)}</span>' for color, words in colors)
    return f'<div class="amp-colors">{named}{more}</div>'


def _bar(bar: Bar, to: str) -> str:
    parts = "".join(map(_part, bar.parts))
    name = as_html(bar.name, 34)
    name = link_html(to, name)
    drawn = f'<div class="amp-share">{parts}</div>'
    if to:  # the name leads there by the keyboard already
        drawn = (
            f'<a class="amp-share" href="{html.escape(to)}" target="_self" tabindex="-1" aria-hidden="true">{parts}</a>'
        )
    return f'<span class="amp-share-name">{name}</span>{drawn}'


def _part(part: DtypePart) -> str:
    style = f"width:{100 * part.share:.2f}%;background:{part.color};color:{part.ink}"
    words = as_html(part.words, 40) if part.is_labelled else ""
    return f'<span style="{style}" title="{as_html(part.hover, 120)}">{words}</span>'


def dtype_steps_key(figure: DtypeSteps) -> str:
    """The colours of the dtypes and, where there are any, the marks."""
    marks = "<span>\N{BLACK DOWN-POINTING TRIANGLE} a module went over to another dtype</span>" if figure.marks else ""
    hint = '<span class="amp-hint">Click a column to see its step.</span>'
    return _dtypes_key({layer.dtype: layer.color for layer in figure.layers}, marks + hint)


def scale_bars_html(figure: ScaleBars | None) -> str:
    """The figure; nothing without one."""
    if figure is None:
        return ""
    axis = figure.axis
    line = "" if figure.used is None else f'<i class="used" style="left:{axis.percent(figure.used):.2f}%"></i>'
    rows = "".join(_scale_row(bar, axis, line) for bar in figure.bars)
    used = f'<div class="amp-place"><i class="amp-used"></i>{as_html(figure.used_words)}</div>' if line else ""
    left_out = f"; {as_html(figure.left_out)}" if figure.left_out else ""
    return (
        f'<figure class="amp-windows" aria-label="{as_html(figure.label)}">{used}{rows}'
        f'<div class="amp-window"><b></b><div class="amp-powers">{labels_html(axis.labelled)}</div></div>'
        f'<figcaption class="amp-place">{as_html(figure.caption)}{left_out}</figcaption></figure>'
    )


def _scale_row(bar: ScaleBar, axis: Axis, line: str) -> str:
    left, right = sorted(map(axis.percent, (bar.low, bar.high)))
    kinds = " ".join((bar.kind, *["open-low"] * bar.is_open_low, *["open-high"] * bar.is_open_high))
    place = f"left:{left:.2f}%;width:{max(right - left, 0.4):.2f}%"
    words = f"<small>{as_html(bar.words)}</small>" if bar.words else ""
    name = as_html(bar.name, 60).replace(".", ".<wbr>")
    return (
        f'<div class="amp-window" title="{as_html(f"{bar.name}: {bar.hover}")}"><b>{name}{words}</b>'
        f'<div class="amp-track"><i class="{kinds}" style="{place}"></i>{line}</div></div>'
    )


#: Formats that fit a telephone; with more the table is scrolled there.
_FIT = 5


def plan_matrix_html(figure: PlanMatrix) -> str:
    """The figure; nothing without rows."""
    if not figure.rows:
        return ""
    heads = "".join(f'<th scope="col">{as_html(name)}</th>' for name in figure.columns)
    rows = "".join(map(_module_row, figure.rows))
    aside = '<small class="amp-aside">More formats to the right</small>' if len(figure.columns) > _FIT else ""
    left_out = f"; {as_html(figure.left_out)} not shown" if figure.left_out else ""
    return (
        f'<div class="amp-scroll">{aside}<table class="amp-matrix" aria-label="{as_html(figure.label)}">'
        f'<thead><tr><th scope="col">module</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
        f'{_key("class", figure.key)}<div class="amp-place">{as_html(figure.unit)}{left_out}</div>'
    )


def _module_row(row: MatrixRow) -> str:
    hover = f' title="{as_html(row.kind, 80)}"' if row.kind else ""
    name = as_html(module_words(row.name)).replace(".", ".<wbr>")
    return f'<tr><th scope="row"{hover}>{name}</th>{"".join(map(_cell, row.cells))}</tr>'


def _cell(cell: FormatCell) -> str:
    number = f"<b>{as_html(cell.number)}</b> " if cell.number else ""
    style = f' style="--part:{cell.weight:.2f}"' if cell.weight else ""
    return f'<td class="{cell.kind}"{style} title="{as_html(cell.hover)}">{number}{as_html(cell.words)}</td>'


#: Pixels of a row, by how many there are.
_HEIGHTS = ((12, 20), (32, 12), (10_000, 7))


def rank_grid_html(figure: RankGrid) -> str:
    """The figure; nothing without rows."""
    if not figure.rows:
        return ""
    height = next(pixels for most, pixels in _HEIGHTS if len(figure.rows) <= most)
    rows = "".join(map(_rank_row, figure.rows))
    ticks = labels_html((100 * at, words) for at, words in figure.ticks)
    return (
        f'<figure class="amp-grid" style="--row:{height}px" aria-label="{as_html(figure.label)}">{rows}'
        f'<div class="amp-grid-row"><b></b><div class="amp-steps">{ticks}</div></div>'
        f'<figcaption class="amp-place">optimizer step</figcaption>{_key("class", figure.key)}</figure>'
    )


def _rank_row(row: GridRow) -> str:
    cells = "".join(map(_stretch, row.stretches))
    return f'<div class="amp-grid-row"><b>{as_html(row.name)}</b><div class="amp-grid-cells">{cells}</div></div>'


def _stretch(stretch: CellStretch) -> str:
    place = f"left:{100 * stretch.start:.3f}%;width:{100 * stretch.width:.3f}%"
    return f'<i class="{stretch.kind}" style="{place}" title="{as_html(stretch.hover)}"></i>'
