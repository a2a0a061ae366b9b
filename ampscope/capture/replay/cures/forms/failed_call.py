"""The call at which a step failed, as the records of its faithful replay show it."""

from __future__ import annotations

from ampscope import provenance
from ampscope.capture.replay.cures.forms.call_form import CallPlace
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.trace.schema import EdgeRow, OpRow, Phase, SiteRow


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
