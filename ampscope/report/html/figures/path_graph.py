"""The way from the origin to the value that mattered: modules as boxes, forward to the right, backward to the left."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ampscope.analysis.origin.closeup import Closeup, Neighbour
from ampscope.analysis.results import Incident, PathNode
from ampscope.analysis.words.wording import short_op
from ampscope.report import numbers
from ampscope.report.html.markup import as_html
from ampscope.report.html.palette import dtype_color
from ampscope.report.html.phrases import span
from ampscope.report.html.source import place
from ampscope.trace.schema import ENTRY_NODES, SINK_NODES, Phase
from ampscope.trace.vocabulary import Severity

#: Boxes of one direction, and ops in one box, up to which nothing is folded; what stays at either end when it is.
_BOXES, _BOXES_HEAD, _BOXES_TAIL = 6, 3, 2
_OPS, _OPS_HEAD, _OPS_TAIL = 4, 2, 1
_DIRECTIONS = {False: "forward", True: "backward"}
_ARROW = '<div class="amp-to" aria-hidden="true"></div>'


@dataclass(frozen=True, slots=True)
class _Stop:
    """An op of the path with what is said of it."""

    node: PathNode
    mark: str = ""
    is_new_line: bool = True  #: another line of the program than the op before


@dataclass(frozen=True, slots=True)
class _Box:
    """Ops of one module that follow each other."""

    module: str  #: its name, else its type: the model itself has no name
    backward: bool
    stops: tuple[_Stop, ...]


def path_graph(incident: Incident, seen: Closeup) -> str:
    """The graph of an incident's path; empty where it has none.

    Args:
        incident: Its path is drawn.
        seen: The neighbours, drawn faint.
    """
    boxes = list(_boxes(incident.path))
    if not boxes:
        return ""
    flows = [(backward, list(group)) for backward, group in groupby(boxes, key=lambda box: box.backward)]
    drawn = [
        _flow(backward, group, _beside(seen) if not number else "") for number, (backward, group) in enumerate(flows)
    ]
    calm = " calm" if incident.severity is Severity.INFO else ""
    return f'<div class="amp-graph{calm}"><div class="amp-flows">{"".join(drawn)}</div>{_readers(seen)}</div>'


def _boxes(path: Sequence[PathNode]) -> Iterator[_Box]:
    backward, placed = False, []
    for stop in _stops(path):
        if stop.node.op not in SINK_NODES:  # a sink belongs to whatever led to it
            backward = stop.node.phase in (Phase.BACKWARD, Phase.OPTIMIZER)
        placed.append((stop, backward))
    for (module, back), group in groupby(
        placed, key=lambda one: (one[0].node.module or one[0].node.module_type, one[1])
    ):
        yield _Box(module, back, tuple(stop for stop, _ in group))


def _stops(path: Sequence[PathNode]) -> Iterator[_Stop]:
    before = None
    for number, node in enumerate(path):
        mark = "origin" if not number else "reached" if number == len(path) - 1 else ""
        yield _Stop(node, mark, node.source != before)
        before = node.source


def _flow(backward: bool, boxes: Sequence[_Box], beside: str) -> str:
    name = _DIRECTIONS[backward]
    parts = [beside] if beside else []
    if len(boxes) <= _BOXES:
        parts += map(_box, boxes)
    else:
        parts += map(_box, boxes[:_BOXES_HEAD])
        parts.append(_folded(boxes[_BOXES_HEAD:-_BOXES_TAIL]))
        parts += map(_box, boxes[-_BOXES_TAIL:])
    return f'<div class="amp-flow {name}"><div class="amp-direction">{name}</div>{_ARROW.join(parts)}</div>'


def _folded(boxes: Sequence[_Box]) -> str:
    ops = sum(len(box.stops) for box in boxes)
    modules = numbers.count(len({box.module for box in boxes}), "module")
    return _fold(f"{numbers.count(ops, 'more op')} in {modules}", "".join(map(_box, boxes)))


def _fold(words: str, content: str) -> str:
    return f'<details class="amp-fold"><summary>{words}</summary>{content}</details>'


def _box(box: _Box) -> str:
    ops = [_op(stop) for stop in box.stops]
    if len(ops) > _OPS:
        left_out = len(ops) - _OPS_HEAD - _OPS_TAIL
        middle = _fold(numbers.count(left_out, "more op"), "".join(ops[_OPS_HEAD:-_OPS_TAIL]))
        ops = [*ops[:_OPS_HEAD], middle, *ops[-_OPS_TAIL:]]
    return f'<section class="amp-module"><header>{_module(box.module)}</header>{"".join(ops)}</section>'


def _module(name: str) -> str:
    return as_html(name, 80).replace(".", ".<wbr>") if name else "outside the watched modules"


def _op(stop: _Stop) -> str:
    node = stop.node
    chip = f' <span class="amp-chip error">{stop.mark}</span>' if stop.mark else ""
    line = (
        f'<code class="amp-line" title="{as_html(_line(node), 240)}">{as_html(_line(node), 120)}</code>'
        if stop.is_new_line and node.source
        else ""
    )
    kind = f"{_health(node)} {stop.mark}".strip()
    return (
        f'<div class="amp-node {kind}" title="{as_html(node.op, 160)}">{_name(node)}{chip}{_values(node)}{line}</div>'
    )


def _name(node: PathNode) -> str:
    if node.op in SINK_NODES or node.op in ENTRY_NODES:
        kind = node.op.replace("_", " ")
        return f"<b>{as_html(kind if node.name in ('', node.op) else f'{kind} {node.name}', 80)}</b>"
    return f"<b>{as_html(short_op(node.op), 60)}</b>"


def _values(node: PathNode) -> str:
    shape = f" {as_html(node.shape, 40)}" if node.shape else ""
    dot = f'<i class="amp-swatch" style="background:{dtype_color(node.dtype)}"></i>' if node.dtype else ""
    return (
        f'<div class="amp-values">{as_html(span(node.min, node.max))}</div>'
        f'<div class="amp-place">{dot}{as_html(node.dtype, 30)}{shape}</div>'
    )


def _line(node: PathNode) -> str:
    return f"{place(node.source)}  {node.source.code.strip()}" if node.source else ""


def _health(node: PathNode) -> str:
    if node.min is None or node.max is None:
        return ""
    return "fine" if math.isfinite(node.min) and math.isfinite(node.max) else "bad"


def _beside(seen: Closeup) -> str:
    """The operands of the origin, healthy as they are."""
    if not seen.operands:
        return ""
    more = seen.operand_count - len(seen.operands)
    rest = f'<div class="amp-place">and {numbers.count(more, "more operand")}</div>' if more > 0 else ""
    drawn = "".join(_neighbour(each, f"operand {each.arg}") for each in seen.operands)
    return f'<section class="amp-module faint"><header>what the origin read</header>{drawn}{rest}</section>'


def _readers(seen: Closeup) -> str:
    if not seen.readers:
        return ""
    more = seen.reader_count - len(seen.readers)
    rest = f'<div class="amp-place">and {numbers.count(more, "more op")}</div>' if more > 0 else ""
    drawn = "".join(_neighbour(each, each.node.module) for each in seen.readers)
    title = "What else read the origin's result"
    return f'<section class="amp-module faint amp-readers"><header>{title}</header>{drawn}{rest}</section>'


def _neighbour(beside: Neighbour, words: str) -> str:
    node = beside.node
    where = f'<span class="amp-place"> {as_html(words, 60)}</span>' if words else ""
    inside = f"{_name(node)}{where}{_values(node)}"
    return f'<div class="amp-node {_health(node)}" title="{as_html(node.op, 160)}">{inside}</div>'
