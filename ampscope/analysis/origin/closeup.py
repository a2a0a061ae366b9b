"""One incident close up: the healthy neighbours of its path in the dataflow, and the lines around its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ampscope.analysis.origin.step_graph import Sites, StepGraph
from ampscope.analysis.results import Finding, Incident, PathNode, SourceLine
from ampscope.trace.read.run import Run
from ampscope.trace.schema import SINK_NODES, EdgeRow, SiteRow

#: Healthy operands and other readers that are named one by one; the rest is counted.
MAX_NEIGHBOURS = 4
#: Lines of the user's program before and after the one that is meant.
AROUND = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """An op beside the path: one that gave the origin a finite operand, or one that also read what went wrong."""

    node: PathNode
    arg: int | None = None  #: which operand of the origin it gave; None for a reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Closeup:
    """What lies around an incident; empty where no trace of its step is left."""

    operands: tuple[Neighbour, ...] = ()  #: who gave the origin its operands, in their order
    operand_count: int = 0  #: all of them, shown or not
    readers: tuple[Neighbour, ...] = ()  #: who read the origin's result besides the next op of the path
    reader_count: int = 0
    lines: tuple[SourceLine, ...] = ()  #: of the same file and function, in their order, the incident's own among them


def closeup(run: Run, item: Incident | Finding) -> Closeup:
    """The surroundings of an incident or finding."""
    sites = Sites(run, item.rank)
    lines = _lines(sites.rows.values(), item.source)
    if not isinstance(item, Incident) or not item.path or not item.traced:
        return Closeup(lines=lines)
    graph = StepGraph(run, sites, item.step, item.traced)
    if not _is_of(item, graph):
        return Closeup(lines=lines)
    operands, readers = _operands(item, graph), _readers(item, graph)
    return Closeup(
        operands=tuple(operands[:MAX_NEIGHBOURS]),
        operand_count=len(operands),
        readers=tuple(readers[:MAX_NEIGHBOURS]),
        reader_count=len(readers),
        lines=lines,
    )


def _is_of(incident: Incident, graph: StepGraph) -> bool:
    """Whether the graph is the one that the incident was read from: another rank numbers its ops otherwise."""
    return all(node.seq in graph.outputs and graph.site(node.seq).op == node.op for node in incident.path)


def _operands(incident: Incident, graph: StepGraph) -> list[Neighbour]:
    origin = incident.path[0].seq
    edges = sorted(graph.inputs[origin], key=lambda edge: edge.arg)
    return [Neighbour(node=_node(graph, edge), arg=edge.arg) for edge in edges]


def _node(graph: StepGraph, edge: EdgeRow) -> PathNode:
    (node,) = graph.path((edge.from_seq,))
    return node


def _readers(incident: Incident, graph: StepGraph) -> list[Neighbour]:
    origin, path = incident.path[0].seq, {node.seq for node in incident.path}
    others = dict.fromkeys(edge.seq for edge in graph.readers[origin] if edge.seq not in path)
    real = [seq for seq in others if graph.site(seq).op not in SINK_NODES]
    return [Neighbour(node=node) for node in graph.path(tuple(real))]


def _lines(sites: Iterable[SiteRow], source: SourceLine | None) -> tuple[SourceLine, ...]:
    """The traced lines of the same function that are near ``source``: all that a trace holds of a program."""
    if source is None:
        return ()
    near = {source.line: source}
    for site in sites:
        same = (site.file, site.function) == (source.file, source.function)
        if same and abs(site.line - source.line) <= AROUND and site.line not in near:
            near[site.line] = SourceLine(file=site.file, line=site.line, function=site.function, code=site.code)
    return tuple(near[line] for line in sorted(near))
