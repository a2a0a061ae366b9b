"""The records of a replay tell where a step failed: at which modules, which call, and on what operands."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ampscope import provenance
from ampscope.capture.changes.call_form import CallPlace
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.provenance import op_name
from ampscope.trace.dtypes import FINFO, HALF_DTYPES, PARTS
from ampscope.trace.schema import ENTRY_NODES, LOSS_CODE, Cast, EdgeRow, OpRow, Phase, SiteRow


class OpKey(NamedTuple):
    """An op of the step, however it is executed: the dtypes may differ."""

    op: str
    module: str
    phase: str
    file: str
    line: int
    grad_fn: str

    @staticmethod
    def of(site: SiteRow) -> OpKey:
        """The op at a site."""
        return OpKey(site.op, site.module, site.phase, site.file, site.line, site.grad_fn)


class Failure(NamedTuple):
    """The place of a failure, as a replay shows it."""

    op: OpKey
    execution: int  #: how many executions of the op came before
    modules: tuple[str, ...]  #: in which values went wrong; `LOSS_CODE` for the code outside
    dtypes: frozenset[str]  #: half dtypes that the step computed in
    by_scale: bool  #: the loss scale takes part: a scaled loss or a gradient is out of range


def located(rows: TracedRows, *, scaled: bool) -> Failure | None:
    """The failure's place by the records of a replay; None where nothing non-finite reached what matters.

    Args:
        rows: The records.
        scaled: Whether the step has a loss scale.
    """
    graph = rows.graph()
    born = provenance.origins(graph)
    if not born:
        return None
    first = graph.site(born[0].seq)
    outside = first.phase == Phase.LOSS and first.op.startswith("aten.mul.")  # the scaling itself, of a half loss
    sites = rows.site_rows()
    return Failure(
        op=OpKey.of(first),
        execution=sum(row.seq < born[0].seq and OpKey.of(sites[row.site]) == OpKey.of(first) for row in rows.ops),
        modules=tuple(dict.fromkeys(_module(graph, origin.seq) for origin in born)),
        dtypes=frozenset(dtype for site in sites.values() for dtype in site.out_dtypes if dtype in HALF_DTYPES),
        by_scale=scaled and (first.phase == Phase.BACKWARD or outside),
    )


def _module(graph: provenance.Graph, seq: int) -> str:
    """The module in which an op runs; of a value from outside, the module that first reads it."""
    site = graph.site(seq)
    if site.op in ENTRY_NODES:
        readers = sorted(edge.seq for edge in graph.readers[seq])
        site = graph.site(readers[0]) if readers else site
    return site.module or (LOSS_CODE if site.phase == Phase.LOSS else "")


def output_at(rows: TracedRows, failure: Failure) -> OpRow | None:
    """Returns the row of what the failed op gave in another replay; None where it was not executed."""
    keys = {number: OpKey.of(site) for number, site in rows.site_rows().items()}
    executions = [row for row in rows.ops if not row.out and keys[row.site] == failure.op]
    return executions[failure.execution] if failure.execution < len(executions) else None


def near_overflow(rows: TracedRows) -> dict[str, float]:
    """The modules whose forward gives numbers of float16 within one doubling of overflow, with the factor left.

    The end of the range itself is no result: code writes it, for a mask.
    """
    sites = rows.site_rows()
    largest = FINFO["float16"].max
    found: dict[str, float] = {}
    for row in rows.ops:
        site = sites[row.site]
        if site.phase not in (Phase.FORWARD, Phase.LOSS) or site.out_dtypes[row.out : row.out + 1] != ("float16",):
            continue
        ends = [abs(end) for end in (row.min, row.max) if end is not None and abs(end) < largest]
        module = site.module or (LOSS_CODE if site.phase == Phase.LOSS else "")
        if module and 2 * max(ends, default=0.0) > largest:
            found[module] = min(found.get(module, math.inf), largest / max(ends))
    return found


def scale_headroom(rows: TracedRows) -> float | None:
    """How many times larger the loss scale could be before a float16 gradient leaves its range.

    Returns:
        The ratio of float16's largest value to the largest float16 gradient of the replay; None where there was none.
    """
    sites = rows.site_rows()
    largest = 0.0
    for row in rows.ops:
        site = sites[row.site]
        if site.phase == Phase.BACKWARD and site.out_dtypes[row.out : row.out + 1] == ("float16",):
            ends = [abs(end) for end in (row.min, row.max) if end is not None and end - end == 0]
            largest = max([largest, *ends])
    return FINFO["float16"].max / largest if largest else None


class FailedCall:
    """The op of the forward at which values went wrong, or whose gradient did.

    Args:
        graph: The step's records.
        seq: The op of the forward.
        origin: The op at the origin: the same one, or one of its backward.

    Attributes:
        wide: What the op gave with everything in float32; None where that is not known.
        wide_graph: The records of that.
    """

    def __init__(self, graph: provenance.Graph, seq: int, origin: int) -> None:
        self.graph = graph
        self.seq = seq
        self.origin = origin
        self.wide: OpRow | None = None
        self.wide_graph: provenance.Graph | None = None

    @property
    def site(self) -> SiteRow:
        """The program point of the op of the forward."""
        return self.graph.site(self.seq)

    @property
    def name(self) -> str:
        """The name of the op of the forward: ``log``."""
        return provenance.op_name(self.site.op)

    @property
    def in_backward(self) -> bool:
        """Whether the forward was finite there, and the gradient was not."""
        return self.origin != self.seq

    @property
    def place(self) -> CallPlace:
        """The user's line that calls it."""
        return CallPlace(self.site.file, self.site.line)

    def operand(self, number: int) -> OpRow | None:
        """Returns the row of the output that an operand is; None where it has none, or that was not recorded."""
        edge = self.edge(number)
        return self.graph.output(edge.from_seq, edge.from_out) if edge is not None else None

    def edge(self, number: int) -> EdgeRow | None:
        """How an operand was read."""
        return next((edge for edge in self.graph.inputs[self.seq] if edge.arg == number), None)


def failed_call(rows: TracedRows) -> FailedCall | None:
    """The call at which a step failed; None where nothing non-finite reached what matters, or no call made it."""
    graph = rows.graph()
    born = provenance.origins(graph)
    if not born:
        return None
    origin = born[0].seq
    site = graph.site(origin)
    if site.phase != Phase.BACKWARD:
        return FailedCall(graph, origin, origin) if site.op.startswith("aten.") else None
    made_by = [seq for seq, written in graph.outputs.items() if seq < origin and written[0].site == site.forward_site]
    return FailedCall(graph, made_by[-1], origin) if made_by else None


#: Ops back, or forth, within which one that belongs to the failed one is looked for.
REACH = 12
_FORWARD = (Phase.FORWARD, Phase.LOSS, Phase.RECOMPUTE)


class Operand(NamedTuple):
    """One operand of the failed op, as the code gave it."""

    dtype: str  #: of complex numbers, that of their parts
    low: float | None
    high: float | None
    smallest: float | None  #: magnitude that is not zero

    @property
    def is_negative(self) -> bool:
        """Whether it holds a number below zero, as far as it was measured."""
        return self.low is not None and self.low < 0


def operand(call: FailedCall, number: int) -> Operand | None:
    """An operand of the failed op; None where the trace does not say what wrote it.

    Args:
        call: The failed op.
        number: Which one.
    """
    edge = call.edge(number)
    dtype = next(iter(call.site.in_dtypes[number : number + 1]), "")
    while edge is not None and call.graph.site(edge.from_seq).cast == Cast.AUTOCAST:
        dtype = next(iter(call.graph.site(edge.from_seq).in_dtypes), dtype)
        edge = next(iter(call.graph.inputs[edge.from_seq]), None)
    if edge is None:
        return None
    row = call.graph.output(edge.from_seq, edge.from_out)
    low, high = (edge.min, edge.max) if edge.partial else (row.min, row.max)
    return Operand(PARTS.get(dtype, dtype), low, high, row.statistics.min_positive)


def place_of_op(call: FailedCall, seq: int) -> CallPlace:
    """The user's line that an op belongs to."""
    site = call.graph.site(seq)
    return CallPlace(site.file, site.line)


def name_of_op(call: FailedCall, seq: int) -> str:
    """The name of an op: ``log``."""
    return op_name(call.graph.site(seq).op)


def ops_before(call: FailedCall, seq: int, through: frozenset[str]) -> Iterator[int]:
    """The ops that one depends on, nearest first, through ops of some names only."""
    seen, front = {seq}, [seq]
    for _ in range(REACH):
        found = dict.fromkeys(edge.from_seq for each in front for edge in call.graph.inputs[each])
        found = {each: None for each in found if each not in seen}
        seen.update(found)
        yield from found
        front = [each for each in found if name_of_op(call, each) in through]


def ops_after(call: FailedCall, seq: int, through: frozenset[str]) -> Iterator[int]:
    """The ops of the forward that read one, nearest first, through ops of some names only."""
    seen, front = {seq}, [seq]
    for _ in range(REACH):
        found = dict.fromkeys(edge.seq for each in front for edge in call.graph.readers[each])
        found = {each: None for each in found if each not in seen and call.graph.site(each).phase in _FORWARD}
        seen.update(found)
        yield from found
        front = [each for each in found if name_of_op(call, each) in through]


def is_masked(call: FailedCall) -> bool:
    """Whether a selection takes the place of some of the op's values at once."""
    readers = ops_after(call, call.seq, frozenset({"_to_copy"}))
    return any(name_of_op(call, each) in ("where", "masked_fill") for each in readers)


def smallest_normal(dtype: str) -> float:
    """The smallest power of ten that is a normal number of a dtype."""
    return float(f"1e{math.ceil(math.log10(FINFO[dtype].smallest_normal))}")


def power_of_ten(largest: float) -> float:
    """The largest power of ten that is not above a number."""
    power = math.floor(math.log10(largest))
    return float(f"1e{power}")
