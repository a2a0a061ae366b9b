"""Where the values of a step first rose above those of a good step before it."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from ampscope.analysis.causes.harmless import Rise
from ampscope.analysis.origin.step_graph import Sites, StepGraph
from ampscope.analysis.tables.step_history import History
from ampscope.analysis.tables.traced_steps import traced_steps
from ampscope.trace.read.run import Run
from ampscope.trace.schema import SINK_NODES, Node, Phase, Source, source_of

#: A value has risen if its largest magnitude is this many times that of the good step,
RISEN = 10.0
#: although those of all that it was computed from are not more than this many times theirs.
NOT_RISEN = 3.0

_Key = tuple[str, str, str, str, str, int, int, int]


class Risen(NamedTuple):
    """The first op whose result rose though its operands had not, or the input that came in larger."""

    graph: StepGraph
    seq: int
    is_input: bool
    fact: Rise


def risen(run: Run, sites: Sites, step: int, history: History | None, optimizer: int) -> Risen | None:
    """Where the values of a step, which was run again, first rose; None where nothing to compare with was traced.

    Args:
        run: The run.
        sites: The sites of one of its ranks.
        step: The step.
        history: The steps of its optimizer.
        optimizer: The number of that.
    """
    live = source_of(Source.LIVE, optimizer)
    earlier = (one.step for one in traced_steps(run, rank=sites.rank) if one.source == live and one.step < step)
    good = next(earlier, None)
    if good is None:
        return None
    now = StepGraph(run, sites, step, source_of(Source.REPLAY, optimizer))
    same_scale = history is not None and _scale(history, good) == _scale(history, step)
    sizes = _sizes(StepGraph(run, sites, good, live))
    grown: dict[int, float] = {}
    for key, (seq, size) in _numbered(now):
        before = sizes.get(key)
        comparable = same_scale or now.site(seq).phase == Phase.FORWARD
        if before is None or not before > 0 or not comparable:
            continue
        grown[seq] = max(grown.get(seq, 0.0), size / before)
        site = now.site(seq)
        operands = [grown.get(edge.from_seq) for edge in now.inputs[seq]]
        known = all(each is not None and each <= NOT_RISEN for each in operands)
        is_input = site.op == Node.INPUT
        if grown[seq] >= RISEN and (is_input or (operands and known)):
            return Risen(now, seq, is_input, Rise(site.op, site.name, site.module, size, before, good))
    return None


def _scale(history: History, step: int) -> float | None:
    """The loss scale of a step; None without a scaler."""
    found = history.scale[history.step == step]
    return float(found[0]) if found.size and found[0] == found[0] else None


def _sizes(graph: StepGraph) -> dict[_Key, float]:
    return {key: size for key, (_, size) in _numbered(graph)}


def _numbered(graph: StepGraph) -> list[tuple[_Key, tuple[int, float]]]:
    """Each output in the order of execution, by its program point and how often that was reached before."""
    reached: Counter[tuple[str, str, str, str, str, int, int]] = Counter()
    found = []
    for seq in sorted(graph.outputs):
        site = graph.site(seq)
        if site.op in SINK_NODES:
            continue
        for row in graph.outputs[seq]:
            if row.min is None or row.max is None:
                continue
            point = (site.op, site.name, site.module, site.phase, site.file, site.line, row.out)
            key = (*point, reached[point])
            reached[point] += 1
            found.append((key, (seq, max(abs(row.min), abs(row.max)))))
    return found
