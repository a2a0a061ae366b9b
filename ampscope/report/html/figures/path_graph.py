"""Paints a graph of boxes whose nodes lead from one to the next; long ways are folded until they are asked for."""

from __future__ import annotations

from ampscope.report.figures.path_graph import Box, Flow, FoldedBoxes, FoldedNodes, Node, PathGraph
from ampscope.report.html.markup import as_html

_ARROW = '<div class="amp-to" aria-hidden="true"></div>'


def path_graph_html(figure: PathGraph | None) -> str:
    """The figure; empty without one."""
    if figure is None:
        return ""
    calm = " calm" if figure.is_calm else ""
    flows = "".join(map(_flow, figure.flows))
    readers = _box(figure.readers, "amp-readers") if figure.readers else ""
    return f'<div class="amp-graph{calm}"><div class="amp-flows">{flows}</div>{readers}</div>'


def _flow(flow: Flow) -> str:
    boxes = [_folded_boxes(each) if isinstance(each, FoldedBoxes) else _box(each) for each in flow.boxes]
    drawn = _ARROW.join([*([_box(flow.beside)] if flow.beside else []), *boxes])
    return f'<div class="amp-flow {flow.name}"><div class="amp-direction">{flow.name}</div>{drawn}</div>'


def _folded_boxes(folded: FoldedBoxes) -> str:
    return _fold(folded.words, "".join(map(_box, folded.boxes)))


def _fold(words: str, content: str) -> str:
    return f'<details class="amp-fold"><summary>{words}</summary>{content}</details>'


def _box(box: Box, kind: str = "") -> str:
    """A box; ``kind`` is one more class for it."""
    kinds = " ".join(filter(None, ("amp-module", "faint" if box.is_beside else "", kind)))
    nodes = "".join(_folded_nodes(each) if isinstance(each, FoldedNodes) else _node(each) for each in box.nodes)
    more = f'<div class="amp-place">{box.more}</div>' if box.more else ""
    title = as_html(box.title, 80).replace(".", ".<wbr>")
    return f'<section class="{kinds}"><header>{title}</header>{nodes}{more}</section>'


def _folded_nodes(folded: FoldedNodes) -> str:
    return _fold(folded.words, "".join(map(_node, folded.nodes)))


def _node(node: Node) -> str:
    kind = " ".join(filter(None, ("amp-node", node.health, node.mark)))
    chip = f' <span class="amp-chip error">{node.mark}</span>' if node.mark else ""
    beside = f'<span class="amp-place"> {as_html(node.beside, 60)}</span>' if node.beside else ""
    inside = f"<b>{as_html(node.name, 80)}</b>{chip}{beside}{_values(node)}{_line(node)}"
    return f'<div class="{kind}" title="{as_html(node.op, 160)}">{inside}</div>'


def _values(node: Node) -> str:
    shape = f" {as_html(node.shape, 40)}" if node.shape else ""
    dot = f'<i class="amp-swatch" style="background:{node.color}"></i>' if node.color else ""
    return (
        f'<div class="amp-values">{as_html(node.values)}</div>'
        f'<div class="amp-place">{dot}{as_html(node.dtype, 30)}{shape}</div>'
    )


def _line(node: Node) -> str:
    if not node.line:
        return ""
    return f'<code class="amp-line" title="{as_html(node.line, 240)}">{as_html(node.line, 120)}</code>'
