"""Writes a traced step op by op, for tests of the walk back to an origin and of the rules that name its cause."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, cast

from ampscope.analysis.replay.recording import Recording, recording
from ampscope.analysis.step_graph import SiteTable, StepGraph
from ampscope.analysis.tables.traced_steps import TracedStep
from ampscope.trace.read.run import Run, open_run
from ampscope.trace.schema import COLLECTIVE_LIBRARIES, Cast, Node, Phase, Row, Source, Table
from tests.support.trace_builder import TraceBuilder

INF, NAN = math.inf, math.nan
#: Lowest and highest value of what an op gave; None where it was not measured.
Span = tuple[float | None, float | None]
FINE = (-1.0, 1.0)
OVERFLOWN = (-1.0, INF)
MASKED = (-INF, 1.0)
NOTANUMBER = (NAN, NAN)

HALF, FULL = "float16", "float32"


@dataclass(frozen=True, slots=True)
class Part:
    """An operand that is a part of what its writer wrote, or that the op overwrites."""

    seq: int
    out: int = 0
    span: tuple[float, float] | None = None  #: its own lowest and highest value
    in_place: bool = False


class Sheet(TraceBuilder):
    """Keeps the rows in memory and answers for them as an open run does: no file, no database."""

    def __init__(self) -> None:
        self._steps, self._segment, self._sites, self._params = {}, 0, 0, 0
        self._seq = {}
        self._rows: dict[Table, list[Any]] = defaultdict(list)

    def put(self, table: Table, row: Row) -> None:
        self._rows[table].append(row)

    def rows(self, table: Table, *, step: int | None = None, source: str | None = None, rank: int = 0) -> list[Any]:
        return [row for row in self._rows[table] if step is None or (row.step, row.source) == (step, source)]


class Step:
    """One execution of one step; every method adds an op and returns its sequence number."""

    def __init__(self, trace: TraceBuilder | None = None, *, step: int = 0, source: str = Source.REPLAY) -> None:
        self._trace = trace or Sheet()
        self._where: dict[str, Any] = {"step": step, "source": source}
        self._dtypes: dict[int, str] = {}
        self._shapes: dict[int, str] = {}
        self._spans: dict[int, Span] = {}
        self._sites: dict[int, int] = {}

    def op(
        self,
        op: str,
        /,
        *operands: int | Part,
        out: Span = FINE,
        more: tuple[Span, ...] = (),
        zeros: int = 0,
        counts: dict[str, Any] | None = None,
        scalars: dict[str, Any] | None = None,
        dtype: str = HALF,
        shape: str = "8x8",
        **site: Any,
    ) -> int:
        """An executed op, ``mm`` for ``aten.mm.default``, at a line of its own; ``more`` are the spans of outputs
        after the first, ``counts`` further statistics. Columns of the site may be given by name.
        """
        reads = [each if isinstance(each, Part) else Part(each) for each in operands]
        known = [read.seq for read in reads if read.seq in self._dtypes]
        columns = {
            "in_dtypes": tuple(self._dtypes[seq] for seq in known),
            "in_shapes": tuple(self._shapes[seq] for seq in known),
            "out_dtypes": (dtype,),
            "out_shapes": (shape,),
            "scalars": json.dumps({name: _in_json(value) for name, value in (scalars or {}).items()}),
            "line": 100 + len(self._sites),
        }
        number = self._trace.site(_full_name(op), **{**columns, **site})
        seen = {"min": out[0], "max": out[1], "zeros": zeros, **(counts or {})}
        seq = self._trace.op(number, **seen, **self._where)
        for index, span in enumerate(more, 1):
            self._trace.op(number, seq=seq, out=index, min=span[0], max=span[1], **self._where)
        for arg, read in enumerate(reads):
            self._edge(seq, arg, read)
        self._dtypes[seq], self._shapes[seq], self._spans[seq], self._sites[seq] = dtype, shape, out, number
        return seq

    def _edge(self, seq: int, arg: int, read: Part) -> None:
        low, high = read.span or (None, None)
        columns = {"arg": arg, "from_out": read.out, "in_place": read.in_place, "min": low, "max": high}
        self._trace.edge(read.seq, seq, partial=read.span is not None, **columns, **self._where)

    def entry(self, node: Node = Node.INPUT, name: str = "x", **columns: Any) -> int:
        """A value that no op of the step wrote."""
        return self.op(node, name=name, **{"file": "", **columns})

    def backward(self, op: str, /, *operands: int | Part, of: int | None = None, **columns: Any) -> int:
        """An op of backward; ``of`` is the forward op whose gradient it computes."""
        forward_site = self._sites[of] if of is not None else None
        return self.op(op, *operands, phase=Phase.BACKWARD, forward_site=forward_site, **columns)

    def sink(self, value: int, node: Node = Node.LOSS, name: str = "") -> int:
        """A value that matters at the end of the step."""
        return self.op(
            node, value, out=self._spans[value], dtype=self._dtypes[value], name=name or str(node), module=""
        )

    def loss(self, value: int) -> int:
        return self.sink(value)

    def gradient(self, value: int, name: str = "fc.weight") -> int:
        return self.sink(value, Node.GRADIENT, name)

    def graph(self) -> StepGraph:
        """What analysis sees of the step; for steps on a `Sheet`."""
        run = cast("Run", self._trace)  # a sheet answers as one does
        return StepGraph(run, SiteTable(run, 0), self._where["step"], self._where["source"])


def _in_json(value: Any) -> Any:
    """Infinities as text, as capture writes them."""
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def _full_name(name: str) -> str:
    if name in set(Node) or name.partition(".")[0] in COLLECTIVE_LIBRARIES:
        return name
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


def recorded(trace: TraceBuilder, step: int = 0, source: str = "replay") -> Recording:
    """What was written so far of a step, as a recording."""
    trace.leave_open()
    return recording(open_run(trace.folder), TracedStep(rank=0, step=step, source=source, rows=0))


def linear_step(trace: TraceBuilder, step: int = 0, scores: tuple[float, float] = (-3.0, 12.0)) -> None:
    """input, weight, cast, matmul, softmax, loss; then backward: mul, two gradients of the matmul, the cast's."""
    at = {"step": step}
    batch = trace.op(trace.site(Node.INPUT, name="x", module="fc", out_dtypes=(FULL,)), **at)
    weight = trace.op(trace.site(Node.PARAMETER, name="fc.weight", module="fc", out_dtypes=(FULL,)), **at)
    to_half = trace.site("aten._to_copy.default", module="fc", cast=Cast.AUTOCAST, in_dtypes=(FULL,))
    cast = trace.op(to_half, **at)
    matmul = trace.site("aten.mm.default", module="fc", out_dtypes=(HALF,), scalars='{"eps": 1e-08}')
    product = trace.op(matmul, min=scores[0], max=scores[1], max_finite=12.0, min_positive=0.25, **at)
    soft = trace.op(trace.site("aten._softmax.default", module="head.soft", out_dtypes=(FULL,)), **at)
    loss = trace.op(trace.site("aten.mean.default", module="", phase=Phase.LOSS, out_dtypes=(FULL,)), **at)
    back = {"phase": Phase.BACKWARD, "module": "fc"}
    ones = trace.op(trace.site("aten.mul.Tensor", phase=Phase.BACKWARD, module="", out_dtypes=(FULL,)), **at)
    grad = trace.site("aten.mm.default", forward_site=matmul, grad_fn="MmBackward0", **back)
    first, second = trace.op(grad, **at), trace.op(grad, **at)
    uncast = trace.op(trace.site("aten._to_copy.default", forward_site=to_half, cast=Cast.AUTOCAST, **back), **at)
    sink = trace.op(trace.site(Node.GRADIENT, name="fc.weight", module="fc", phase="", out_dtypes=(FULL,)), **at)
    chain = [(weight, cast), (batch, product), (cast, product), (product, soft), (soft, loss), (ones, first)]
    for before, after in (*chain, (ones, second), (second, uncast), (uncast, sink)):
        trace.edge(before, after, arg=int((before, after) == (cast, product)), **at)
