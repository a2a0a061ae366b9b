"""What the tracer wrote about one step, ready to be asked about."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ampscope
from ampscope.trace.schema import ENTRY_NODES, SINK_NODES, EdgeRow, OpRow, Phase, SiteRow, Source, Table


@dataclass(frozen=True, slots=True)
class Op:
    """An executed op: its site, a row for each output, the edges from what it read."""

    site: SiteRow
    outputs: tuple[OpRow, ...]
    inputs: tuple[EdgeRow, ...]

    @property
    def seq(self) -> int:
        return self.outputs[0].seq

    @property
    def out(self) -> OpRow:
        return self.outputs[0]

    @property
    def scalars(self) -> dict[str, Any]:
        return json.loads(self.site.scalars)


class Trace:
    """One traced step of a run."""

    def __init__(self, run: ampscope.Run, step: int, source: str = Source.LIVE) -> None:
        self.sites = {row.site: row for row in run.rows(Table.SITES)}
        rows = run.rows(Table.OPS, step=step, source=source)
        edges = run.rows(Table.EDGES, step=step, source=source)
        self.ops = [
            Op(
                self.sites[first.site],
                tuple(row for row in rows if row.seq == first.seq),
                tuple(edge for edge in edges if edge.seq == first.seq),
            )
            for first in rows
            if first.out == 0
        ]

    def find(self, name: str, **columns: Any) -> list[Op]:
        """Ops by a part of the operator's name and by columns of their sites, in order of execution."""
        return [
            op
            for op in self.ops
            if name in op.site.op and all(getattr(op.site, column) == value for column, value in columns.items())
        ]

    def one(self, name: str, **columns: Any) -> Op:
        (op,) = self.find(name, **columns)
        return op

    def at(self, seq: int) -> Op:
        return next(op for op in self.ops if op.seq == seq)

    def sources(self, op: Op) -> list[str]:
        """What wrote each operand: an operator's name, or the name of an input, parameter or buffer."""
        writers = [self.at(edge.from_seq).site for edge in op.inputs]
        return [site.name if site.op in ENTRY_NODES else site.op for site in writers]

    def calculation(self) -> list[tuple[str, ...]]:
        """What was computed, without values: equal for two executions of the same code."""
        nodes = ENTRY_NODES | SINK_NODES
        sites = [op.site for op in self.ops if op.site.op not in nodes and not _starts_backward(op.site)]
        return [(s.op, s.phase, s.module, str(s.line), s.cast, s.autocast, s.grad_fn, *s.out_dtypes) for s in sites]


def _starts_backward(site: SiteRow) -> bool:
    return site.op == "aten.ones_like.default" and site.phase != Phase.FORWARD


def line_of(function: Callable[..., object] | type, code: str) -> int:
    """The line number, in its file, of the first line of ``function`` below its decorators that contains ``code``."""
    lines, first = inspect.getsourcelines(function)
    numbered = enumerate(lines, first)
    return next(number for number, line in numbered if code in line and not line.lstrip().startswith("@"))
