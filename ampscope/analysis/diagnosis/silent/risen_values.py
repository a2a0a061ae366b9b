"""What is otherwise in a step than in those before it: where its values first rose, and what changed around them."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from ampscope.analysis.causes.harmless import Rise, Since
from ampscope.analysis.numerics.arrays import FloatArray
from ampscope.analysis.origin.step_graph import Sites, StepGraph
from ampscope.analysis.tables.step_history import History
from ampscope.analysis.tables.traced_steps import traced_steps
from ampscope.trace.read.run import Run
from ampscope.trace.schema import ENTRY_NODES, SINK_NODES, Node, Phase, Source, source_of

#: A value has risen if its largest magnitude is this many times that of the good step,
RISEN = 10.0
#: although those of all that it was computed from are not more than this many times theirs.
NOT_RISEN = 3.0
#: A learning rate or a loss scale has changed if it did by more than this share.
MOVED = 0.2

_Key = tuple[str, str, str, str, str, int, int, int]


class Risen(NamedTuple):
    """The first op whose result rose though its operands had not, or the input that came in larger."""

    graph: StepGraph
    seq: int
    is_input: bool
    fact: Rise


class Compared(NamedTuple):
    """A step that was run again, and a good one before it that was traced as it ran."""

    good: StepGraph
    now: StepGraph


def compared(run: Run, sites: Sites, step: int, optimizer: int) -> Compared | None:
    """A step and a good one; None where nothing to compare with was traced.

    Args:
        run: The run.
        sites: The sites of one of its ranks.
        step: The step.
        optimizer: The number of its optimizer.
    """
    live = source_of(Source.LIVE, optimizer)
    earlier = (one.step for one in traced_steps(run, rank=sites.rank) if one.source == live and one.step < step)
    good = next(earlier, None)
    if good is None:
        return None
    now = StepGraph(run, sites, step, source_of(Source.REPLAY, optimizer))
    return Compared(StepGraph(run, sites, good, live), now) if now.outputs else None


def since(history: History, step: int, graphs: Compared | None) -> Since:
    """What is otherwise than in the step before, and than in a good step that was traced.

    Args:
        history: The steps of the optimizer.
        step: The step.
        graphs: The step and a good one.
    """
    place = int(np.searchsorted(history.step, step))
    found = Since(rate=_moved(history.lr, place), scale=_moved(history.scale, place))
    if graphs is None:
        return found
    before, now = _rows(graphs.good), _rows(graphs.now)
    found = found._replace(batch=(before, now) if before and now and before != now else None)
    were = _dtypes(graphs.good)
    for key, dtype in _dtypes(graphs.now).items():
        if were.get(key, dtype) != dtype:
            return found._replace(dtype=(were[key], dtype), op=key[0], module=key[2])
    return found


def _dtypes(graph: StepGraph) -> dict[_Key, str]:
    """The dtype of what each op gives, but for casts: how many there are depends on the dtypes themselves."""
    sites = ((key, graph.site(seq)) for key, (seq, _) in _numbered(graph))
    computed = ((key, site) for key, site in sites if site.op not in ENTRY_NODES and "_to_copy" not in site.op)
    return {key: site.out_dtypes[key[6]] for key, site in computed if key[6] < len(site.out_dtypes)}


def _moved(values: FloatArray, place: int) -> tuple[float, float] | None:
    """What a number had been and what it was; None where it was nearly the same, or is not known."""
    before, now = (float(each) for each in values[place - 1 : place + 1]) if place > 0 else (1.0, 1.0)
    return (before, now) if abs(now - before) > MOVED * abs(before) else None


def _rows(graph: StepGraph) -> int | None:
    """The first dimension of the first input that has one."""
    inputs = (graph.site(seq) for seq in sorted(graph.outputs) if graph.site(seq).op == Node.INPUT)
    shapes = (site.out_shapes[0] for site in inputs if site.out_shapes and site.out_shapes[0])
    first = next(shapes, "").partition("x")[0]
    return int(first) if first.isdigit() else None


def risen(graphs: Compared, history: History | None) -> Risen | None:
    """Where the values of a step, which was run again, first rose above those of a good one.

    Args:
        graphs: Both.
        history: The steps of their optimizer.
    """
    now, good = graphs.now, graphs.good.step
    same_scale = history is not None and _scale(history, good) == _scale(history, now.step)
    sizes = _sizes(graphs.good)
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
