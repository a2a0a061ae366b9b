"""Sharded models on several ranks: trained as if nobody watched, without a collective, and told what can be told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import ampscope
from ampscope import provenance
from ampscope.analysis.causes.recognition import recognise
from ampscope.analysis.step_graph import SiteTable, StepGraph
from ampscope.trace.schema import EventKind, IncidentRow, ReplayStatus, Table
from ampscope.trace.vocabulary import Cause, Verdict
from tests.integration.frameworks.sharded.models import BAD_MODULE, SETTINGS
from tests.integration.frameworks.sharded.training import BAD_RANK, BAD_STEP, STEPS
from tests.support.torchrun import on_ranks

pytestmark = pytest.mark.slow

#: Every setting on two ranks; on three, where shards are uneven, one of each kind.
CASES = [*((name, 2) for name in SETTINGS), ("fsdp2", 3), ("tensor-parallel", 3)]
FSDP = [case for case in CASES if case[0].startswith("fsdp")]


class Job(NamedTuple):
    """What a job of several ranks left behind."""

    folder: Path
    trained: list[dict[str, Any]]  #: of each rank, by how it was trained

    @property
    def _ranks(self) -> range:
        return range(len(self.trained))

    def run(self, name: str) -> ampscope.Run:
        return ampscope.open_run(self.folder / name)

    def incidents(self, name: str) -> dict[int, IncidentRow]:
        """The incident at the bad step, by rank."""
        rows = {rank: self.run(name).rows(Table.INCIDENTS, rank=rank, step=BAD_STEP) for rank in self._ranks}
        return {rank: found[0] for rank, found in rows.items() if found}

    def causes(self, name: str, rank: int) -> set[Cause]:
        """Why the traced ops of the bad step on a rank went wrong."""
        run = self.run(name)
        graph = StepGraph(run, SiteTable(run, rank), BAD_STEP, "live")
        return {recognise(graph, born).cause for born in provenance.origins(graph)}

    def origins(self, name: str, rank: int, source: str) -> list[tuple[str, str]]:
        """Op and module of each origin of the bad step on a rank."""
        run = self.run(name)
        graph = StepGraph(run, SiteTable(run, rank), BAD_STEP, source)
        return [(graph.site(born.seq).op, graph.site(born.seq).module) for born in provenance.origins(graph)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Job]:
    done: dict[tuple[str, int], Job] = {}

    def of(name: str, ranks: int) -> Job:
        if (name, ranks) not in done:
            folder = tmp_path_factory.mktemp(f"{name}-{ranks}")
            on_ranks("tests.integration.frameworks.sharded.training", folder, name, ranks=ranks)
            trained = [json.loads((folder / f"trained-{rank}.json").read_text("utf-8")) for rank in range(ranks)]
            done[name, ranks] = Job(folder, trained)
        return done[name, ranks]

    return of


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_no_bit_and_no_collective_is_another(name: str, ranks: int, job: Callable[[str, int], Job]) -> None:
    for trained in job(name, ranks).trained:
        assert trained["alone"]["collectives"]
        assert trained["healthy"] == trained["alone"]
        for how in ("bad", "bad, traced", "bad, watched first"):
            assert trained[how] == trained["alone, bad"], how


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_every_part_stays_on_and_sees_every_step(name: str, ranks: int, job: Callable[[str, int], Job]) -> None:
    done = job(name, ranks)
    for how in ("healthy", "bad", "traced", "first"):
        run = done.run(how)
        assert [row.text for row in run.rows(Table.EVENTS, kind=EventKind.WARNING)] == []
        for rank in range(ranks):
            assert len(run.rows(Table.STEPS, rank=rank)) == STEPS
            names = {row.name for row in run.rows(Table.PARAMS, rank=rank)}
            assert {"0.weight", "0.bias", "2.weight", "2.bias"} <= names
    assert ampscope.diagnose(done.folder / "healthy").verdict == Verdict.HEALTHY


@pytest.mark.parametrize(("name", "ranks"), FSDP)
def test_a_replay_that_would_gather_says_so(name: str, ranks: int, job: Callable[[str, int], Job]) -> None:
    done = job(name, ranks)
    for how in ("bad", "traced", "first"):
        incidents = done.incidents(how)
        assert list(incidents) == list(range(ranks))
        for row in incidents.values():
            assert row.replay == ReplayStatus.UNAVAILABLE
            assert "several ranks" in row.replay_reason


def test_an_optimizer_that_is_shared_out_leaves_the_replay_exact(job: Callable[[str, int], Job]) -> None:
    done = job("zero", 2)
    incidents = done.incidents("bad")
    assert list(incidents) == [0, 1]
    assert incidents[BAD_RANK].replay == ReplayStatus.EXACT
    assert done.origins("bad", BAD_RANK, "replay") == [("aten.mul.Tensor", BAD_MODULE)]


@pytest.mark.parametrize(("name", "ranks"), FSDP)
def test_the_trace_of_the_real_step_names_the_op(name: str, ranks: int, job: Callable[[str, int], Job]) -> None:
    (op, module), *_ = job(name, ranks).origins("traced", BAD_RANK, "live")
    if SETTINGS[name].half:
        assert (op, module) == ("aten.mul.Tensor", BAD_MODULE)
    else:
        assert op == "input"


@pytest.mark.parametrize(("name", "ranks"), [*FSDP, ("ddp", 2), ("ddp-compressed", 2)])
def test_the_other_ranks_say_that_they_received_it(name: str, ranks: int, job: Callable[[str, int], Job]) -> None:
    done = job(name, ranks)
    for rank in set(range(ranks)) - {BAD_RANK}:
        assert done.causes("traced", rank) == {Cause.RECEIVED}


@pytest.mark.parametrize("name", ["tensor-parallel", "tensor-parallel-varying"])
def test_no_replay_of_tensor_parallelism_begins(name: str, job: Callable[[str, int], Job]) -> None:
    done = job(name, 2)
    incidents = done.incidents("bad")
    assert list(incidents) == [0, 1]
    for rank, row in incidents.items():
        assert row.replay == ReplayStatus.UNAVAILABLE
        assert "tensor parallelism" in row.replay_reason
        assert done.origins("traced", rank, "live") == [("aten.mul.Tensor", BAD_MODULE)]
