"""Paints a graph of boxes whose nodes lead from one to the next; long ways are folded until they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ampscope.analysis.results import PathNode
from ampscope.report.figures.path_graph import Box, Flow, FoldedBoxes, FoldedNodes, Node, PathGraph
from ampscope.report.html.markup import as_html, link_html

_ARROW = '<div class="amp-to" aria-hidden="true"></div>'


def _nowhere(_: object) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathWays:
    """Where the parts of the figure lead: addresses, empty for nowhere."""

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
        """A box; ``kind`` is one more class for it."""
        kinds = " ".join(filter(None, ("amp-module", "faint" if box.is_beside else "", kind)))
        nodes = "".join(map(self._nodes, box.nodes))
        more = f'<div class="amp-place">{box.more}</div>' if box.more else ""
        title = as_html(box.title, 80).replace(".", ".<wbr>")
        first = next((node for node in box.nodes if isinstance(node, Node)), None)
        if first is not None and not box.is_beside:
            title = link_html(self.ways.module(first.of), title)
        return f'<section class="{kinds}"><header>{title}</header>{nodes}{more}</section>'

    def _folded_boxes(self, folded: FoldedBoxes) -> str:
        return _fold(folded.words, "".join(map(self.box, folded.boxes)))

    def _nodes(self, drawn: Node | FoldedNodes) -> str:
        if isinstance(drawn, FoldedNodes):
            return _fold(drawn.words, "".join(map(self._node, drawn.nodes)))
        return self._node(drawn)

    def _node(self, node: Node) -> str:
        kind = " ".join(filter(None, ("amp-node", node.health, node.mark)))
        chip = f' <span class="amp-chip error">{node.mark}</span>' if node.mark else ""
        beside = f'<span class="amp-place"> {as_html(node.beside, 60)}</span>' if node.beside else ""
        name = link_html(self.ways.op(node.of), as_html(node.name, 80))
        values = link_html(self.ways.values(node.of), as_html(node.values))
        inside = f'<b>{name}</b>{chip}{beside}<div class="amp-values">{values}</div>{_type(node)}{self._line(node)}'
        return f'<div class="{kind}" title="{as_html(node.op, 160)}">{inside}</div>'

    def _line(self, node: Node) -> str:
        if not node.line:
            return ""
        if self.ways.copies:
            told = f'data-copy="{as_html(node.line, 400)}" title="Copy {as_html(node.line, 240)}"'
            return f'<button type="button" class="amp-line" {told}>{as_html(node.line, 120)}</button>'
        return f'<code class="amp-line" title="{as_html(node.line, 240)}">{as_html(node.line, 120)}</code>'


def _fold(words: str, content: str) -> str:
    return f'<details class="amp-fold"><summary>{words}</summary>{content}</details>'


def _type(node: Node) -> str:
    shape = f" {as_html(node.shape, 40)}" if node.shape else ""
    dot = f'<i class="amp-swatch" style="background:{node.color}"></i>' if node.color else ""
    return f'<div class="amp-place">{dot}{as_html(node.dtype, 30)}{shape}</div>'
