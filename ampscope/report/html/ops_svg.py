"""Paints what ops computed: histograms over powers of two, and the way of a value through modules as boxes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ampscope.analysis.results import PathNode
from ampscope.report.figures.axis import Axis
from ampscope.report.figures.magnitudes_figure import DtypeBand, HistogramBar, MagnitudesFigure, TensorHistogram
from ampscope.report.figures.path_graph import Box, DrawnOp, Flow, FoldedBoxes, FoldedNodes, PathGraph
from ampscope.report.html.markup import as_html, link_html

#: Percent of the axis at its ends, where half of a label would lie outside.
_END = 1.5


def magnitudes_html(figure: MagnitudesFigure | None) -> str:
    """The figure; empty without one."""
    if figure is None:
        return ""
    axis = figure.axis
    drawn = "".join(_histogram(each, axis) for each in figure.histograms)
    bands = "".join(_band(band, axis) for band in figure.bands)
    labels = "".join(_label(*each) for each in axis.labelled)
    return (
        f'<div class="amp-magnitudes">{drawn}<div class="amp-place">{figure.left_out}</div>'
        f'<div class="amp-bands">{bands}</div><div class="amp-powers">{labels}</div>'
        f'<div class="amp-place">{figure.caption}</div></div>'
    )


def _label(at: float, words: str) -> str:
    """A power below where it stands; at an end of the axis beside that end, where all of it has room."""
    aside = "" if _END < at < 100 - _END else f";transform:translateX({0 if at <= _END else -100}%)"
    return f'<span style="left:{at:.2f}%{aside}">{words}</span>'


def _histogram(each: TensorHistogram, axis: Axis) -> str:
    bars = "".join(_bar(bar, axis) for bar in each.bars)
    empty = f'<span class="amp-nothing">{each.empty}</span>' if each.empty else ""
    mark = "" if each.mark is None else f'<span class="amp-reach" style="left:{axis.percent(each.mark):.2f}%"></span>'
    return (
        f'<div class="amp-operand"><div class="amp-panel-name">{_title(each)}</div>'
        f'<div class="amp-histogram">{_limits(each, axis)}{bars}{empty}{mark}</div></div>'
    )


def _title(each: TensorHistogram) -> str:
    facts = " ".join(as_html(fact, 30) for fact in each.facts)
    zeros = f", {as_html(each.zeros)}" if each.zeros else ""
    alarm = f' <span class="amp-key">and {as_html(each.nonfinite)}</span>' if each.nonfinite else ""
    mark = f' <b class="amp-reached">{as_html(each.mark_words)}</b>' if each.mark_words else ""
    return f"<b>{as_html(each.role, 60)}</b> <span class='amp-faint'>{facts}{zeros}</span>{alarm}{mark}"


def _bar(bar: HistogramBar, axis: Axis) -> str:
    style = f"{_box(axis, bar.low, bar.high)};--part:{bar.height:.3f};background:{bar.color}"
    return f'<i style="{style}" title="{as_html(bar.hover)}"></i>'


def _limits(each: TensorHistogram, axis: Axis) -> str:
    """Draws the shaded ranges that lie outside the tensor's own dtype."""
    shaded = []
    if each.vanishes_below is not None:
        box = _box(axis, axis.low, each.vanishes_below)
        shaded.append(f'<span class="amp-beyond low" style="{box}"><em>vanishes</em></span>')
    if each.overflows_above is not None:
        box = _box(axis, each.overflows_above, axis.high)
        shaded.append(f'<span class="amp-beyond high" style="{box}"><em>overflows</em></span>')
    return "".join(shaded)


def _band(band: DtypeBand, axis: Axis) -> str:
    """The range, cut to the picture."""
    normal = f"background:{band.color};color:{band.ink};{_box(axis, band.normal, band.top)}"
    pale = f"background:{band.color};{_box(axis, band.lowest, band.normal)}"
    return f'<div class="amp-band"><i class="pale" style="{pale}"></i><span style="{normal}">{band.words}</span></div>'


def _box(axis: Axis, start: float, stop: float) -> str:
    """The style of what reaches from one power to another."""
    left = axis.percent(start)
    return f"left:{left:.2f}%;width:{axis.percent(stop) - left:.2f}%"


_ARROW = '<div class="amp-to" aria-hidden="true"></div>'


def _nowhere(_: object) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathWays:
    """The links of the figure's parts: addresses, empty for nowhere."""

    op: Callable[[PathNode], str] = _nowhere  #: by the name of a node
    module: Callable[[PathNode], str] = _nowhere  #: by the title of a box, of its first node
    values: Callable[[PathNode], str] = _nowhere  #: by what a node gave
    copies: bool = False  #: whether a line of code is a button that copies it; a script of the page does that


def path_graph_html(figure: PathGraph | None, ways: PathWays | None = None) -> str:
    """The figure; empty without one.

    Args:
        figure: The graph.
        ways: Where its parts lead; nowhere in a file of its own.
    """
    if figure is None:
        return ""
    painter = _Painter(ways or PathWays())
    calm = " calm" if figure.is_calm else ""
    flows = "".join(map(painter.flow, figure.flows))
    readers = painter.box(figure.readers, "amp-readers") if figure.readers else ""
    return f'<div class="amp-graph{calm}"><div class="amp-flows">{flows}</div>{readers}</div>'


@dataclass(frozen=True, slots=True)
class _Painter:
    ways: PathWays

    def flow(self, flow: Flow) -> str:
        boxes = [self._folded_boxes(each) if isinstance(each, FoldedBoxes) else self.box(each) for each in flow.boxes]
        drawn = _ARROW.join([*([self.box(flow.beside)] if flow.beside else []), *boxes])
        return f'<div class="amp-flow {flow.name}"><div class="amp-direction">{flow.name}</div>{drawn}</div>'

    def box(self, box: Box, kind: str = "") -> str:
        """Paints a box; ``kind`` is one more class for it."""
        kinds = " ".join(filter(None, ("amp-module", "faint" if box.is_beside else "", kind)))
        nodes = "".join(map(self._nodes, box.nodes))
        more = f'<div class="amp-place">{box.more}</div>' if box.more else ""
        title = as_html(box.title, 80).replace(".", ".<wbr>")
        first = next((node for node in box.nodes if isinstance(node, DrawnOp)), None)
        if first is not None and not box.is_beside:
            title = link_html(self.ways.module(first.of), title)
        return f'<section class="{kinds}"><header>{title}</header>{nodes}{more}</section>'

    def _folded_boxes(self, folded: FoldedBoxes) -> str:
        return _fold(folded.words, "".join(map(self.box, folded.boxes)))

    def _nodes(self, drawn: DrawnOp | FoldedNodes) -> str:
        if isinstance(drawn, FoldedNodes):
            return _fold(drawn.words, "".join(map(self._node, drawn.nodes)))
        return self._node(drawn)

    def _node(self, node: DrawnOp) -> str:
        kind = " ".join(filter(None, ("amp-node", node.health, node.mark)))
        chip = f' <span class="amp-chip error">{node.mark}</span>' if node.mark else ""
        beside = f'<span class="amp-place"> {as_html(node.beside, 60)}</span>' if node.beside else ""
        name = link_html(self.ways.op(node.of), as_html(node.name, 80))
        values = link_html(self.ways.values(node.of), as_html(node.values))
        inside = f'<b>{name}</b>{chip}{beside}<div class="amp-values">{values}</div>{_type(node)}{self._line(node)}'
        return f'<div class="{kind}" title="{as_html(node.op, 160)}">{inside}</div>'

    def _line(self, node: DrawnOp) -> str:
        if not node.line:
            return ""
        if self.ways.copies:
            told = f'data-copy="{as_html(node.line, 400)}" title="Copy {as_html(node.line, 240)}"'
            return f'<button type="button" class="amp-line" {told}>{as_html(node.line, 120)}</button>'
        return f'<code class="amp-line" title="{as_html(node.line, 240)}">{as_html(node.line, 120)}</code>'


def _fold(words: str, content: str) -> str:
    return f'<details class="amp-fold"><summary>{words}</summary>{content}</details>'


def _type(node: DrawnOp) -> str:
    shape = f" {as_html(node.shape, 40)}" if node.shape else ""
    dot = f'<i class="amp-swatch" style="background:{node.color}"></i>' if node.color else ""
    return f'<div class="amp-place">{dot}{as_html(node.dtype, 30)}{shape}</div>'
