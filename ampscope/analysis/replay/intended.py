"""Which values of a step are not finite because the code wants them so: masks of -inf, and what they alone make."""

from __future__ import annotations

from ampscope.analysis.origin.step_graph import Sites, StepGraph
from ampscope.analysis.tables.traced_steps import TracedStep
from ampscope.provenance import Harmless, harmless_births, is_deliberate
from ampscope.trace.read.run import Run


def intended(run: Run, traced: TracedStep) -> set[int]:
    """Sequence numbers of the ops that wrote a mask, or carry one that does no harm."""
    graph = StepGraph(run, Sites(run, traced.rank), traced.step, traced.source)
    queue = [birth.seq for birth in harmless_births(graph) if birth.why is Harmless.MASK]
    found = set(queue)
    while queue:
        bad = {edge.seq for edge in graph.readers[queue.pop()] if graph.edge_is_bad(edge)}
        fresh = {seq for seq in bad - found if graph.bad_output(seq) is not None}
        found |= fresh
        queue.extend(fresh)
    return found.union(seq for seq in graph.outputs if is_deliberate(graph, seq) and not graph.bad_inputs(seq))
