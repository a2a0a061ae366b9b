"""The way from the origin to the value that mattered: modules as boxes, forward to the right, backward to the left."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ampscope.analysis.results import Incident, PathNode
from ampscope.analysis.step_graph import IncidentSurroundings, Neighbour
from ampscope.analysis.words import op_in_words
from ampscope.report.numbers import UNMEASURED, count, span
from ampscope.report.palette import dtype_color
from ampscope.report.safe_text import place
from ampscope.trace.schema import ENTRY_NODES, SINK_NODES, Phase
from ampscope.trace.schema import Node as Pseudo
from ampscope.trace.vocabulary import Severity

#: Boxes of one direction, and ops in one box, up to which nothing is folded; what stays at either end when it is.
_BOXES, _BOXES_HEAD, _BOXES_TAIL = 6, 3, 2
_OPS, _OPS_HEAD, _OPS_TAIL = 4, 2, 1
#: What stands before the names of what the loop carries, most of which say themselves that it is carried.
_CARRIED: dict[str, str] = {Pseudo.CARRIED: "", Pseudo.CARRIED_AFTER: "after: "}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnOp:
    """An op with what it gave."""

    of: PathNode
    name: str
    op: str  #: its whole name
    values: str
    dtype: str
    shape: str
    color: str  #: of its dtype; empty without one
    health: str  #: ``fine``, ``bad``, or empty where it was not measured
    mark: str = ""  #: ``origin`` or ``reached``
    beside: str = ""  #: a word beside its name
    line: str = ""  #: the user's line, where it is another than that of the op before


@dataclass(frozen=True, slots=True)
class FoldedNodes:
    """Ops that are shown when asked for."""

    words: str
    nodes: tuple[DrawnOp, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Ops of one module that follow each other, or neighbours of the path."""

    title: str
    nodes: tuple[DrawnOp | FoldedNodes, ...]
    more: str = ""  #: what is left out, in words
    is_beside: bool = False  #: it is not on the path


@dataclass(frozen=True, slots=True)
class FoldedBoxes:
    """Boxes that are shown when asked for."""

    words: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Boxes from one to the next, to the right, or to the left where it runs ``backward``."""

    backward: bool
    boxes: tuple[Box | FoldedBoxes, ...]
    beside: Box | None = None  #: what its first box read

    @property
    def name(self) -> str:
        """The flow's direction in a word."""
        return "backward" if self.backward else "forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class PathGraph:
    """The flows below each other, and who else read the origin's result."""

    flows: tuple[Flow, ...]
    readers: Box | None
    is_calm: bool  #: nothing in it is an alarm


@dataclass(frozen=True, slots=True)
class _Run:
    """Ops of one module that follow each other on the path."""

    module: str  #: its name, else its type: the model itself has no name
    backward: bool
    nodes: tuple[DrawnOp, ...]


def path_graph(incident: Incident, seen: IncidentSurroundings) -> PathGraph | None:
    """The graph of an incident's path; None where it has none.

    Args:
        incident: Its path is shown.
        seen: The neighbours, shown beside it.
    """
    flows = groupby(_runs(incident.path), key=lambda run: run.backward)
    described = [_flow(backward, list(runs)) for backward, runs in flows]
    if not described:
        return None
    described[0] = Flow(backward=described[0].backward, boxes=described[0].boxes, beside=_operands(seen))
    return PathGraph(flows=tuple(described), readers=_readers(seen), is_calm=incident.severity is Severity.INFO)


def _runs(path: Sequence[PathNode]) -> Iterator[_Run]:
    backward, placed = False, []
    for op, node in zip(path, _nodes(path), strict=True):
        if op.op not in SINK_NODES:  # a sink belongs to whatever led to it
            backward = op.phase in (Phase.BACKWARD, Phase.OPTIMIZER)
        placed.append((op.module or op.module_type, backward, node))
    for (module, back), group in groupby(placed, key=lambda one: one[:2]):
        yield _Run(module, back, tuple(node for *_, node in group))


def _nodes(path: Sequence[PathNode]) -> Iterator[DrawnOp]:
    before = None
    for number, op in enumerate(path):
        mark = "origin" if not number else "reached" if number == len(path) - 1 else ""
        yield _node(op, mark=mark, line=_line(op) if op.source != before else "")
        before = op.source


def _flow(backward: bool, runs: Sequence[_Run]) -> Flow:
    boxes: list[Box | FoldedBoxes] = [_box(run) for run in runs]
    if len(runs) > _BOXES:
        boxes[_BOXES_HEAD:-_BOXES_TAIL] = [_folded(runs[_BOXES_HEAD:-_BOXES_TAIL])]
    return Flow(backward=backward, boxes=tuple(boxes))


def _folded(runs: Sequence[_Run]) -> FoldedBoxes:
    ops = count(sum(len(run.nodes) for run in runs), "more op")
    modules = count(len({run.module for run in runs}), "module")
    return FoldedBoxes(f"{ops} in {modules}", tuple(map(_box, runs)))


def _box(run: _Run) -> Box:
    nodes: list[DrawnOp | FoldedNodes] = list(run.nodes)
    if len(nodes) > _OPS:
        middle = run.nodes[_OPS_HEAD:-_OPS_TAIL]
        nodes[_OPS_HEAD:-_OPS_TAIL] = [FoldedNodes(count(len(middle), "more op"), middle)]
    return Box(title=run.module or "outside the watched modules", nodes=tuple(nodes))


def _node(op: PathNode, *, mark: str = "", beside: str = "", line: str = "") -> DrawnOp:
    return DrawnOp(
        of=op,
        name=_name(op),
        op=op.op,
        values=span(op.min, op.max, missing=UNMEASURED),
        dtype=op.dtype,
        shape=op.shape,
        color=dtype_color(op.dtype) if op.dtype else "",
        health=_health(op),
        mark=mark,
        beside=beside,
        line=line,
    )


def _name(op: PathNode) -> str:
    if op.op in SINK_NODES or op.op in ENTRY_NODES:
        kind = op.op.replace("_", " ")
        if op.name in ("", op.op):
            return kind
        return f"{_CARRIED[op.op]}{op.name}" if op.op in _CARRIED else f"{kind} {op.name}"
    return op_in_words(op.op)


def _line(op: PathNode) -> str:
    return f"{place(op.source)}  {op.source.code.strip()}" if op.source else ""


def _health(op: PathNode) -> str:
    if op.min is None or op.max is None:
        return ""
    return "fine" if math.isfinite(op.min) and math.isfinite(op.max) else "bad"


def _operands(seen: IncidentSurroundings) -> Box | None:
    return _beside(
        "what the origin read",
        [(each, f"operand {each.arg}") for each in seen.operands],
        left_out=seen.operand_count - len(seen.operands),
        noun="more operand",
    )


def _readers(seen: IncidentSurroundings) -> Box | None:
    return _beside(
        "What else read the origin's result",
        [(each, each.node.module) for each in seen.readers],
        left_out=seen.reader_count - len(seen.readers),
        noun="more op",
    )


def _beside(title: str, neighbours: Sequence[tuple[Neighbour, str]], *, left_out: int, noun: str) -> Box | None:
    if not neighbours:
        return None
    return Box(
        title=title,
        nodes=tuple(_node(each.node, beside=words) for each, words in neighbours),
        more=f"and {count(left_out, noun)}" if left_out > 0 else "",
        is_beside=True,
    )
