"""Collectives that a model calls by itself are ops of its steps, with group, sizes and values on both sides."""

from __future__ import annotations

import json
from typing import Any

import pytest

import ampscope
from ampscope import provenance
from ampscope.analysis.causes.outside import FromOthers
from ampscope.analysis.causes.recognition import Recognised, recognise
from ampscope.analysis.step_graph import SiteTable, StepGraph
from ampscope.trace.schema import COLLECTIVE_LIBRARIES, EventKind, Phase, ReplayStatus, SiteRow, Table
from ampscope.trace.vocabulary import Cause
from tests.integration.frameworks.sharded.explicit import BAD_RANK, BAD_STEP, BATCH, WIDTH
from tests.support.torchrun import on_ranks

pytestmark = pytest.mark.slow

RANKS = 2
#: What each rank adds to the count of all.
PAIRS = float(BATCH * BATCH * RANKS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ampscope.Run:
    folder = tmp_path_factory.mktemp("explicit") / "run"
    on_ranks("tests.integration.frameworks.sharded.explicit", folder, ranks=RANKS)
    return ampscope.open_run(folder)


def graph_of(run: ampscope.Run, rank: int, step: int) -> StepGraph:
    return StepGraph(run, SiteTable(run, rank), step, "live")


def exchanges(graph: StepGraph) -> list[tuple[SiteRow, int]]:
    """The ops of a step that communicate, in order, each with its number."""
    found = [(graph.site(seq), seq) for seq in sorted(graph.outputs)]
    return [(site, seq) for site, seq in found if site.op.partition(".")[0] in COLLECTIVE_LIBRARIES]


def facts(site: SiteRow) -> dict[str, Any]:
    return {name: value for name, value in json.loads(site.scalars).items() if name != "group"}


@pytest.mark.parametrize("rank", range(RANKS))
def test_each_is_an_op_with_its_group_and_sizes(run: ampscope.Run, rank: int) -> None:
    (gather, _), (count, _), (largest, _) = exchanges(graph_of(run, rank, 1))
    own = {"group_size": RANKS, "rank": rank}
    assert (gather.op, gather.phase) == ("c10d.allgather_.default", Phase.FORWARD)
    assert (gather.in_shapes, gather.out_shapes) == ((f"{BATCH}x{WIDTH}",), (f"{BATCH}x{WIDTH}",) * RANKS)
    assert facts(gather) == own
    assert "dist.all_gather(parts" in gather.code
    assert (count.op, count.phase) == ("c10d.allreduce_.default", Phase.LOSS)
    assert facts(count) == {**own, "reduce": "sum"}
    assert (largest.op, facts(largest)) == ("_c10d_functional.all_reduce.default", {**own, "reduce": "max"})


def test_values_are_known_on_the_way_in_and_once_they_are_there(run: ampscope.Run) -> None:
    graph = graph_of(run, 0, 1)
    (_, gather), (_, count), _ = exchanges(graph)
    (sent,) = graph.inputs[count]
    assert (sent.min, sent.max) == (PAIRS, PAIRS)
    (row,) = graph.outputs[count]
    assert (row.min, row.max) == (RANKS * PAIRS, RANKS * PAIRS)  # although it was asynchronous
    assert all(row.min is not None for row in graph.outputs[gather])


def origin(run: ampscope.Run, rank: int) -> tuple[str, Recognised]:
    graph = graph_of(run, rank, BAD_STEP)
    (born,) = provenance.origins(graph)
    return graph.site(born.seq).op, recognise(graph, born)


def test_what_came_from_another_rank_is_said_to_and_from_which(run: ampscope.Run) -> None:
    op, found = origin(run, 1 - BAD_RANK)
    assert (op, found.cause) == ("c10d.allgather_.default", Cause.RECEIVED)
    assert isinstance(found.reason, FromOthers)
    assert (found.reason.sender, found.reason.sums) == (BAD_RANK, False)
    op, found = origin(run, BAD_RANK)
    assert (op, found.cause) == ("input", Cause.BAD_INPUT)


def test_a_replay_ends_at_the_functional_one_and_nothing_switched_itself_off(run: ampscope.Run) -> None:
    for rank in range(RANKS):
        (row,) = run.rows(Table.INCIDENTS, rank=rank)
        assert row.replay == ReplayStatus.UNAVAILABLE
        assert "communicates with other ranks (_c10d_functional.all_reduce" in row.replay_reason
    assert run.rows(Table.EVENTS, kind=EventKind.WARNING) == []
