"""What is told to be intended, and to harm nothing, against walks that take no short cut."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ampscope import open_run
from ampscope.analysis.replay.recording import recording
from ampscope.analysis.step_graph import SiteTable, StepGraph
from ampscope.analysis.tables.traced_steps import TracedStep, traced_steps
from ampscope.provenance import Harmless, harmless_births, is_deliberate
from ampscope.trace.read.run import Run
from ampscope.trace.schema import SINK_NODES
from tests.support.paths import SAMPLES

NAMES = ("attention-overflow", "log-zero")


def steps_of(name: str) -> Iterator[tuple[Run, TracedStep, StepGraph]]:
    with open_run(SAMPLES / name) as run:
        for step in traced_steps(run):
            yield run, step, StepGraph(run, SiteTable(run, step.rank), step.step, step.source)


def carries(graph: StepGraph, seq: int) -> set[int]:
    """The ops that what is not finite in an op's result makes so."""
    found, queue = {seq}, [seq]
    while queue:
        bad = {edge.seq for edge in graph.readers[queue.pop()] if graph.edge_is_bad(edge)}
        fresh = {each for each in bad - found if graph.bad_output(each) is not None}
        found |= fresh
        queue.extend(fresh)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_what_is_intended_is_so_by_the_whole_graph(name: str) -> None:
    for run, step, graph in steps_of(name):
        masks = [birth.seq for birth in harmless_births(graph) if birth.why is Harmless.MASK]
        meant = {seq for seq in graph.outputs if is_deliberate(graph, seq) and not graph.bad_inputs(seq)}
        seen = recording(run, step)
        assert set(seen.seq[seen.intended].tolist()) == meant.union(*(carries(graph, seq) for seq in masks))
        assert np.all(seen.nonfinite[seen.intended])


@pytest.mark.parametrize("name", NAMES)
def test_what_harms_nothing_carries_to_no_sink(name: str) -> None:
    for _, _, graph in steps_of(name):
        births = list(harmless_births(graph))
        for birth in births:
            assert not {graph.site(seq).op for seq in carries(graph, birth.seq)} & SINK_NODES
        assert list(harmless_births(graph, [birth.seq for birth in births])) == births


def test_the_samples_have_masks() -> None:
    births = [birth for name in NAMES for _, _, graph in steps_of(name) for birth in harmless_births(graph)]
    assert Harmless.MASK in {birth.why for birth in births}
