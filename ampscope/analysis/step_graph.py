"""A traced step is a dataflow graph: operands and path in words, an incident close up, where a second run parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ampscope.analysis.results import Finding, Incident, Operand, PathNode, SourceLine
from ampscope.analysis.words import op_in_words
from ampscope.provenance import Graph, How, parting
from ampscope.trace.dtypes import HALF_DTYPES
from ampscope.trace.read.run import Run
from ampscope.trace.schema import (
    ENTRY_NODES,
    SINK_NODES,
    EdgeRow,
    Node,
    OpRow,
    Phase,
    SiteRow,
    Source,
    Statistics,
    Table,
)


class SiteTable:
    """The sites of a run, read once.

    Args:
        run: The run.
        rank: The rank whose numbering of sites is meant.
    """

    def __init__(self, run: Run, rank: int) -> None:
        self._run = run
        self.rank = rank

    @cached_property
    def rows(self) -> dict[int, SiteRow]:
        """Every site by number."""
        return {row.site: row for row in self._run.rows(Table.SITES, rank=self.rank)}

    def __getitem__(self, number: int) -> SiteRow:
        return self.rows.get(number) or _NOWHERE._replace(site=number)


#: Stands for a site that a damaged trace has lost: an op of which nothing is known but its values.
_NOWHERE = SiteRow(0, "", "", "", "", "", "", 0, "", "", (), (), (), (), "{}", "", "", "", None)


class StepGraph(Graph):
    """The dataflow of one step, from one execution of it.

    Args:
        run: The run.
        sites: The sites of one of its ranks.
        step: Number of the step.
        source: Which execution: ``live``, ``replay``.
    """

    def __init__(self, run: Run, sites: SiteTable, step: int, source: str) -> None:
        self.step = step
        self.source = source
        self.rank = sites.rank
        self._run = run
        ops = run.rows(Table.OPS, step=step, source=source, rank=sites.rank)
        edges = run.rows(Table.EDGES, step=step, source=source, rank=sites.rank)
        super().__init__(ops, edges, sites.__getitem__)

    @cached_property
    def half(self) -> bool:
        """Whether any op of the step computed in half precision."""
        sites = {row.site for rows in self.outputs.values() for row in rows}
        return any(dtype in HALF_DTYPES for number in sites for dtype in self._site(number).out_dtypes)

    def producer(self, edge: EdgeRow) -> OpRow:
        """The output that an edge carries."""
        return self.output(edge.from_seq, edge.from_out)

    def place(self, seq: int) -> SiteRow:
        """The program point to show for an op: for what came from outside, where it was first read."""
        reader = self.first_reader(seq) if self.site(seq).op in ENTRY_NODES else None
        return self.site(seq if reader is None else reader)

    def module_type(self, site: SiteRow) -> str:
        """The class of the module that an op ran in; empty for code outside every watched module."""
        if site.module or site.module_type:
            return site.module_type
        ran = site if site.forward_site is None else self._site(site.forward_site)
        return self._run.manifest.model if ran.phase in (Phase.FORWARD, Phase.RECOMPUTE) else ""

    def type_of(self, module: str) -> str:
        """The class of a watched module by name; empty where no op of this step ran in it."""
        sites = (self.site(seq) for seq in self.outputs)
        return next((site.module_type for site in sites if module and site.module == module), "")

    def first_reader(self, seq: int) -> int | None:
        """The first real op that read what ``seq`` wrote."""
        return min((edge.seq for edge in self.readers[seq]), default=None)

    def operands(self, seq: int) -> tuple[Operand, ...]:
        """Returns the operands that an op read, in order."""
        return tuple(self._operand(edge) for edge in sorted(self.inputs[seq], key=lambda edge: edge.arg))

    def results(self, seq: int) -> tuple[Operand, ...]:
        """Returns the results that an op wrote."""
        return tuple(self._result(row) for row in self.outputs[seq])

    def _result(self, row: OpRow) -> Operand:
        site, one = self.site(row.seq), slice(row.out, row.out + 1)
        role = f"output {row.out}"
        return _described(role, site.out_dtypes[one], site.out_shapes[one], row.statistics, row.numel)

    def _operand(self, edge: EdgeRow) -> Operand:
        site, producer = self.site(edge.seq), self.site(edge.from_seq)
        role = producer.name if producer.op in ENTRY_NODES and producer.name else f"input {edge.arg}"
        dtype, shape = site.in_dtypes[edge.arg : edge.arg + 1], site.in_shapes[edge.arg : edge.arg + 1]
        if edge.partial:
            return _described(role, dtype, shape, Statistics(edge.min, edge.max))
        row = self.producer(edge)
        return _described(role, dtype, shape, row.statistics, row.numel)

    def path(self, seqs: tuple[int, ...]) -> tuple[PathNode, ...]:
        """The ops with these numbers, as shown to people."""
        return tuple(self._path_node(seq) for seq in seqs)

    def _path_node(self, seq: int) -> PathNode:
        site = self.site(seq)
        row = self.bad_output(seq) or self.outputs[seq][0]
        return PathNode(
            seq=seq,
            op=site.op,
            name=site.name,
            module=site.module,
            module_type=self.module_type(site),
            phase=public_phase(site.phase),
            dtype=next(iter(site.out_dtypes), ""),
            shape=next(iter(site.out_shapes), ""),
            min=row.min,
            max=row.max,
            source=SourceLine.of(site),
        )


def public_phase(phase: str) -> str:
    """Loss code is part of forward for people, and so is what checkpointing recomputes."""
    return Phase.FORWARD if phase in (Phase.LOSS, Phase.RECOMPUTE) else phase


def _described(
    role: str, dtypes: tuple[str, ...], shapes: tuple[str, ...], statistics: Statistics, numel: int | None = None
) -> Operand:
    dtype, shape = next(iter(dtypes), ""), next(iter(shapes), "")
    return Operand(role=role, dtype=dtype, shape=shape, numel=numel, statistics=statistics)


#: Nodes that stand for what an optimizer left of one parameter.
_LEFT = (Node.WEIGHT_AFTER, Node.STATE_AFTER)


def operands_of(graph: StepGraph, seq: int, out: int) -> list[EdgeRow]:
    """The operands that one result of an op was computed from: of an op over lists, those in its place and in none."""
    return [edge for edge in graph.inputs[seq] if _goes_into(graph, edge, out)]


def owner_of(graph: StepGraph, seq: int, out: int) -> str | None:
    """The one parameter that a bad result of an optimizer's op went into; None where it went into several, or none."""
    names: set[str] = set()
    waiting, seen = [(seq, out)], {(seq, out)}
    while waiting:
        written, place = waiting.pop()
        for edge in graph.readers[written]:
            if edge.from_out != place:
                continue
            site = graph.site(edge.seq)
            if site.op in _LEFT:
                names.add(parameter_of(site))
            reached = {(edge.seq, each) for each in _results_of(graph, edge)} - seen
            seen |= reached
            waiting += reached
    return names.pop() if len(names) == 1 else None


def module_of_update(graph: StepGraph, seq: int) -> str:
    """The module of the one parameter that an optimizer's op worked for; empty for several.

    That is the one that its bad result went into, unless it was computed from the gradients of several.
    """
    row = graph.bad_output(seq)
    name = owner_of(graph, seq, row.out) if row is not None else None
    if row is None or not name or len(_gradients_of(graph, seq, row.out)) > 1:
        return ""
    return name.rpartition(".")[0]


def _gradients_of(graph: StepGraph, seq: int, out: int) -> set[tuple[int, int]]:
    """The gradients that a result of an optimizer's op was computed from, where the trace holds their backward."""
    found: set[tuple[int, int]] = set()
    waiting, seen = [(seq, out)], {(seq, out)}
    while waiting:
        for edge in operands_of(graph, *waiting.pop()):
            source, phase = (edge.from_seq, edge.from_out), graph.site(edge.from_seq).phase
            if phase == Phase.BACKWARD:
                found.add(source)
            elif phase == Phase.OPTIMIZER and source not in seen:
                seen.add(source)
                waiting.append(source)
    return found


def parameter_of(site: SiteRow) -> str:
    """The qualified name of the parameter that a sink was left of: of a tensor of its state, ``exp_avg of NAME``."""
    return site.name.rpartition(" of ")[2] if site.op == Node.STATE_AFTER else site.name


def _results_of(graph: StepGraph, edge: EdgeRow) -> Iterator[int]:
    return (row.out for row in graph.outputs[edge.seq] if _goes_into(graph, edge, row.out))


def _goes_into(graph: StepGraph, edge: EdgeRow, out: int) -> bool:
    """Whether an operand takes part in a result: a list's does in the one with its place, any other in all."""
    site = graph.site(edge.seq)
    count = len(site.out_dtypes)
    if "_foreach_" not in site.op or not count:
        return True
    in_lists = len(site.in_dtypes) // count * count
    return edge.arg >= in_lists or edge.arg % count == out


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondRun:
    """How two runs of one step differ, up to the op at which the first went wrong."""

    how: How | None  #: None where all that was traced is the same
    seq: int  #: the first op of which they do not say the same
    phase: str  #: its `Phase`
    missing: str  #: what is missing for a proof that nothing but chance lies between them, in words


def second_run(real: StepGraph, again: StepGraph, until: int) -> SecondRun | None:
    """Compares the trace of a step as it ran with that of its replay.

    Args:
        real: The best trace of the step.
        again: That of its faithful replay.
        until: The op at which the step went wrong.

    Returns:
        How they part; None where the step was not traced as it ran.
    """
    if not real.source.startswith(Source.LIVE):
        return None
    found = parting(real, again, until)
    if found is None:
        same = "all that was traced of it was the same both times, so that nobody saw what wrote what is not finite"
        return SecondRun(how=None, seq=until, phase=real.site(until).phase, missing=same)
    op = op_in_words(real.site(found.seq).op)
    missing = {
        How.DIGITS: f"{op} does not give the same digits of the same operands",
        How.UNMEASURED: f"{op} could not be compared, for its values were not measured",
    }
    phase = public_phase(real.site(found.seq).phase)
    return SecondRun(how=found.how, seq=found.seq, phase=phase, missing=missing.get(found.how, ""))


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
class IncidentSurroundings:
    """Holds the surroundings of an incident; empty where no trace of its step is left."""

    operands: tuple[Neighbour, ...] = ()  #: who gave the origin its operands, in their order
    operand_count: int = 0  #: all of them, shown or not
    readers: tuple[Neighbour, ...] = ()  #: who read the origin's result besides the next op of the path
    reader_count: int = 0
    lines: tuple[SourceLine, ...] = ()  #: of the same file and function, in their order, the incident's own among them


def closeup(run: Run, item: Incident | Finding) -> IncidentSurroundings:
    """The surroundings of an incident or finding."""
    sites = SiteTable(run, item.rank)
    lines = _lines(sites.rows.values(), item.source)
    if not isinstance(item, Incident) or not item.path or not item.traced:
        return IncidentSurroundings(lines=lines)
    graph = StepGraph(run, sites, item.step, item.traced)
    if not _is_of(item, graph):
        return IncidentSurroundings(lines=lines)
    operands, readers = _operands(item, graph), _readers(item, graph)
    return IncidentSurroundings(
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
    return [Neighbour(node=graph.path((edge.from_seq,))[0], arg=edge.arg) for edge in edges]


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
            near[site.line] = SourceLine.of(site) or source
    return tuple(near[line] for line in sorted(near))
