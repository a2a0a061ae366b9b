"""A replay has what the real step received from other ranks, where that is still there, and asks nobody for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ampscope
from ampscope import provenance
from ampscope.analysis.causes.recognition import recognise
from ampscope.analysis.step_graph import SiteTable, StepGraph
from ampscope.trace.schema import EventKind, IncidentRow, ReplayStatus, Table, Trial
from ampscope.trace.vocabulary import Cause, Verdict
from tests.integration.frameworks.sharded.receiving import BAD_RANK, BAD_STEP, EXCHANGES
from tests.support.torchrun import on_ranks

pytestmark = pytest.mark.slow

RANKS = 2
NAMES = [*(each.__name__ for each in EXCHANGES), "loop"]
#: Models whose replay must end, and the words that say why.
ENDED = {"large_and_changed": "changed in place since", "as_op": "what it received was not seen"}
EXACT = [name for name in NAMES if name not in ENDED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("receiving")
    on_ranks("tests.integration.frameworks.sharded.receiving", made, ranks=RANKS)
    return made


def incident(run: ampscope.Run, rank: int) -> IncidentRow:
    (row,) = run.rows(Table.INCIDENTS, rank=rank)
    assert row.step == BAD_STEP
    return row


def test_no_bit_is_another_and_nothing_switched_itself_off(folder: Path) -> None:
    for rank in range(RANKS):
        trained = json.loads((folder / f"trained-{rank}.json").read_text("utf-8"))
        assert {name.partition("/")[0] for name in trained} == set(NAMES)
        for name, (alone, watched) in trained.items():
            assert watched == alone, name
            assert ampscope.open_run(folder / name).rows(Table.EVENTS, kind=EventKind.WARNING) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_healthy_run_is_healthy(name: str, folder: Path) -> None:
    assert ampscope.diagnose(folder / name / "healthy").verdict == Verdict.HEALTHY


@pytest.mark.parametrize("name", EXACT)
def test_a_replay_uses_what_was_received(name: str, folder: Path) -> None:
    run = ampscope.open_run(folder / name / "nan")
    for rank in range(RANKS):
        row = incident(run, rank)
        assert (row.replay, row.replay_reason) == (ReplayStatus.EXACT, "")
        graph = StepGraph(run, SiteTable(run, rank), BAD_STEP, "replay")
        causes = {recognise(graph, born).cause for born in provenance.origins(graph)}
        assert causes == {Cause.BAD_INPUT if rank == BAD_RANK else Cause.RECEIVED}


@pytest.mark.parametrize("name", EXACT)
def test_the_rank_with_the_bad_batch_is_told(name: str, folder: Path) -> None:
    primary = ampscope.diagnose(folder / name / "nan").primary
    assert primary is not None
    assert (primary.cause, primary.step) == (Cause.BAD_INPUT, BAD_STEP)
    assert getattr(primary, "rank", None) == BAD_RANK


@pytest.mark.parametrize(("name", "why"), ENDED.items())
def test_a_replay_ends_where_it_is_gone_and_says_so(name: str, why: str, folder: Path) -> None:
    run = ampscope.open_run(folder / name / "nan")
    for rank in range(RANKS):
        row = incident(run, rank)
        assert row.replay == ReplayStatus.UNAVAILABLE
        assert "communicates with other ranks" in row.replay_reason
        assert why in row.replay_reason


def test_no_cure_is_tried_on_what_others_sent_for_another_step(folder: Path) -> None:
    run = ampscope.open_run(folder / "averaged" / "overflow")
    row = incident(run, BAD_RANK)
    assert row.replay == ReplayStatus.EXACT
    graph = StepGraph(run, SiteTable(run, BAD_RANK), BAD_STEP, "replay")
    assert {recognise(graph, born).cause for born in provenance.origins(graph)} == {Cause.FP16_OVERFLOW}
    (trial,) = run.rows(Table.REPLAYS, rank=BAD_RANK)
    assert trial.outcome == Trial.UNAVAILABLE
    assert "received from other ranks" in trial.reason
