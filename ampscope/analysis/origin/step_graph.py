"""Loads one traced step of a run as a dataflow graph, with its operands and path in the words of the results."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from ampscope.analysis.results import Operand, PathNode, SourceLine
from ampscope.provenance import Graph
from ampscope.trace.dtypes import HALF_DTYPES
from ampscope.trace.read.run import Run
from ampscope.trace.schema import ENTRY_NODES, EdgeRow, OpRow, Phase, SiteRow, Statistics, Table


class Sites:
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

    def __init__(self, run: Run, sites: Sites, step: int, source: str) -> None:
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
        """What an op read, in order."""
        return tuple(self._operand(edge) for edge in sorted(self.inputs[seq], key=lambda edge: edge.arg))

    def results(self, seq: int) -> tuple[Operand, ...]:
        """What an op wrote."""
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
            source=source_line(site),
        )


def public_phase(phase: str) -> str:
    """Loss code is part of forward for people, and so is what checkpointing recomputes."""
    return Phase.FORWARD if phase in (Phase.LOSS, Phase.RECOMPUTE) else phase


def source_line(row: Any) -> SourceLine | None:
    """The user's line that a row with ``file``, ``line``, ``function`` and ``code`` names; None where it has none."""
    if not row.file:
        return None
    return SourceLine(file=row.file, line=row.line, function=row.function, code=row.code)


def _described(
    role: str, dtypes: tuple[str, ...], shapes: tuple[str, ...], statistics: Statistics, numel: int | None = None
) -> Operand:
    dtype, shape = next(iter(dtypes), ""), next(iter(shapes), "")
    return Operand(role=role, dtype=dtype, shape=shape, numel=numel, statistics=statistics)
