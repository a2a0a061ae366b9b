"""Whole runs of several ranks: who agrees with whom, who lags, and the picture of all steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from ampscope import diagnose, open_run
from ampscope.analysis.causes.ranks import Shared
from ampscope.analysis.overview.rank_lives import (
    COLUMNS,
    ROWS,
    CellState,
    RankLife,
    Ranks,
    ranks_at_a_glance,
    ranks_story,
)
from ampscope.report.html.tables_html import bad_rows
from ampscope.trace.schema import EventKind, ReplayStatus
from ampscope.trace.vocabulary import Cause, Severity, Verdict
from tests.support.scenes import BAD_STEP
from tests.support.scenes import ranks as scene_of_ranks
from tests.support.trace_builder import TraceBuilder

#: What a rank's step holds that is not the same on all of them.
Differs = Callable[[int, int], Mapping[str, Any]]


def job(folder: Path, *, ranks: int, steps: int = 40, differs: Differs = lambda rank, step: {}) -> Path:
    """Replicas that agree in all they share, but for what ``differs``."""
    for rank in range(ranks):
        trace = TraceBuilder(folder, rank=rank, world_size=ranks)
        trace.event(EventKind.START)
        for step in range(steps):
            trace.step(**{"grad_norm": 1.5 + math.sin(step), "loss": 2.0 + rank, **differs(rank, step)})
        trace.event(EventKind.CLOSE, step=steps)
        trace.close()
    return folder


def seen(folder: Path) -> Ranks:
    with open_run(folder) as run:
        return ranks_at_a_glance(run)


def test_replicas_that_agree(run_folder: Path) -> None:
    found = seen(job(run_folder, ranks=3))
    assert found.replicas.groups == ((0, 1, 2),)
    assert found.replicas.apart == ()
    assert found.grid.cells.tolist() == [[CellState.STEPPED] * 40] * 3
    assert diagnose(run_folder).verdict is Verdict.HEALTHY
    assert ranks_story(found) == (
        "3 of 3 ranks are in this trace.",
        "3 ranks are replicas: gradient norm, loss scale and skips agree at every step.",
    )


def test_one_that_computes_something_else_is_told_with_its_step(run_folder: Path) -> None:
    job(run_folder, ranks=4, differs=lambda rank, step: {"grad_norm": 9.0} if rank == 2 and step >= 30 else {})
    (apart,) = seen(run_folder).replicas.apart
    assert (apart.what, apart.step, apart.steps) == (Shared.GRAD_NORM, 30, 10)
    assert (apart.ranks, apart.others, apart.value) == ((2,), (0, 1, 3), 9.0)
    diagnosis = diagnose(run_folder)
    (incident,) = diagnosis.incidents
    assert (incident.cause, incident.rank, incident.step) == (Cause.REPLICA_APART, 2, 30)
    assert diagnosis.verdict is Verdict.PROBLEM
    assert "on rank 2 of 4" in diagnosis.summary


def test_what_rounding_makes_of_a_sum_is_no_difference(run_folder: Path) -> None:
    job(run_folder, ranks=3, differs=lambda rank, step: {"grad_norm": 1.0 + step + 1e-7 * rank * (step > 20)})
    assert seen(run_folder).replicas.apart == ()


def test_ranks_that_never_agreed_are_no_replicas(run_folder: Path) -> None:
    """As where each holds a part of the model."""
    found = seen(job(run_folder, ranks=3, differs=lambda rank, step: {"grad_norm": 1.0 + step * (rank + 1)}))
    assert found.replicas.groups == ()
    assert diagnose(run_folder).verdict is Verdict.HEALTHY


def test_parts_of_a_model_that_are_each_replicated(run_folder: Path) -> None:
    def halves(rank: int, step: int) -> Mapping[str, Any]:
        return {"grad_norm": 1.0 + step * (1 + rank % 2) + (rank == 3 and step == 35)}

    found = seen(job(run_folder, ranks=6, differs=halves))
    assert found.replicas.groups == ((0, 2, 4), (1, 3, 5))
    assert [(apart.ranks, apart.step, apart.steps) for apart in found.replicas.apart] == [((3,), 35, 1)]


def test_two_that_differ_once_cannot_be_told_apart(run_folder: Path) -> None:
    job(run_folder, ranks=2, differs=lambda rank, step: {"grad_norm": 7.0} if (rank, step) == (1, 30) else {})
    (incident,) = diagnose(run_folder).incidents
    assert (incident.severity, incident.rank, incident.also_on) == (Severity.WARNING, 0, (1,))
    assert "it cannot be told which" in incident.explanation


def test_training_that_synchronises_seldom_is_no_fault(run_folder: Path) -> None:
    """After a warm-up every rank has gradients of its own."""
    job(run_folder, ranks=4, differs=lambda rank, step: {"grad_norm": 1.0 + step + rank * (step >= 20)})
    (apart,) = seen(run_folder).replicas.apart
    assert apart.for_good
    assert diagnose(run_folder).verdict is Verdict.HEALTHY


def test_a_skip_that_one_rank_makes_alone(run_folder: Path) -> None:
    job(run_folder, ranks=2, differs=lambda rank, step: {"skipped": (rank, step) == (1, 30)})
    (incident,) = diagnose(run_folder).incidents
    assert incident.cause is Cause.REPLICA_APART
    assert incident.severity is Severity.ERROR
    assert "decided otherwise" in incident.explanation
    assert "ShardedGradScaler" in incident.remedies[0].text


def test_a_norm_that_is_not_finite_on_one_rank_alone(run_folder: Path) -> None:
    nan = {"grad_norm": math.nan}
    job(run_folder, ranks=3, differs=lambda rank, step: nan if (rank, step) == (0, 25) else {})
    (apart,) = seen(run_folder).replicas.apart
    assert (apart.ranks, apart.step) == ((0,), 25)


def test_who_is_there_who_lags_and_who_died(run_folder: Path) -> None:
    for rank, steps in ((0, 30), (2, 12)):
        trace = TraceBuilder(run_folder, rank=rank, world_size=4)
        trace.event(EventKind.START)
        for step in range(steps):
            trace.step(grad_norm=float(step), skipped=step == 3)
        if rank == 0:
            trace.event(EventKind.CLOSE, step=steps)
        trace.close()
    found = seen(run_folder)
    assert [state.life for state in found.states] == [
        RankLife.CLOSED,
        RankLife.MISSING,
        RankLife.DIED,
        RankLife.MISSING,
    ]
    assert [(state.rank, state.behind) for state in found.lagging] == [(2, 18)]
    assert found.states[2].skipped == 1
    words = " ".join(ranks_story(found))
    assert "Nothing is there of ranks 1 and 3" in words
    assert "Rank 2 ended without being closed." in words
    assert "Rank 2 stopped at step 11, 18 steps behind" in words


def test_a_rank_that_is_being_written(run_folder: Path) -> None:
    job(run_folder, ranks=1)
    trace = TraceBuilder(run_folder, rank=1, world_size=2)
    trace.event(EventKind.START)
    trace.step()
    trace.leave_open()
    assert [state.life for state in seen(run_folder).states] == [RankLife.CLOSED, RankLife.WRITING]
    trace.close()


def test_the_picture_shows_origin_receivers_and_who_is_apart(run_folder: Path) -> None:
    scene_of_ranks(run_folder).close()
    cells = seen(run_folder).grid.cells
    assert cells[:, BAD_STEP].tolist() == [CellState.RECEIVED, CellState.ORIGIN, CellState.RECEIVED, CellState.NOTHING]
    assert cells[2, 60] == CellState.APART
    assert cells[0, 60] == CellState.STEPPED


def test_a_large_job_is_thinned_and_nothing_bad_is_lost(run_folder: Path) -> None:
    ranks, steps = 2 * ROWS, 2 * COLUMNS
    for rank in range(ranks):
        trace = TraceBuilder(run_folder, rank=rank, world_size=ranks)
        for step in (0, 101, steps - 1):
            trace.step(step=step, skipped=(rank, step) == (ranks - 1, 101))
        trace.close()
    grid = seen(run_folder).grid
    assert grid.cells.shape == (ROWS, COLUMNS)
    assert (grid.cells == CellState.SKIPPED).nonzero()[0].tolist() == [ROWS - 1]
    assert grid.ranks_of(ROWS - 1) == (ranks - 2, ranks - 1)


def test_nothing_yet(run_folder: Path) -> None:
    found = seen(TraceBuilder(run_folder).close())
    assert found.grid.is_empty
    assert ranks_story(found) == ()


def _weights(folder: Path, ranks: int, at: Callable[[int, int], float], traced: Collection[int] = (5, 30)) -> Path:
    """A job whose ranks trace some steps, with the largest weight that ``at`` gives for rank and step."""
    for rank in range(ranks):
        trace = TraceBuilder(folder, rank=rank, world_size=ranks)
        for _ in range(rank):
            trace.site()  # every rank numbers its sites by itself
        site = trace.site("parameter", name="fc.weight", in_dtypes=(), in_shapes=())
        for step in range(40):
            trace.step(grad_norm=1.5 + math.sin(step), traced="live" if step in traced else "")
        for step in traced:
            trace.op(site, step=step, source="live", max=at(rank, step))
        trace.close()
    return folder


def test_weights_that_are_another_rank_s_no_longer(run_folder: Path) -> None:
    _weights(run_folder, 3, lambda rank, step: 2.5 if (rank, step) == (1, 30) else 1.0)
    (incident,) = diagnose(run_folder).incidents
    assert (incident.cause, incident.rank, incident.step) == (Cause.REPLICA_APART, 1, 30)
    assert "fc.weight reached 2.5 on rank 1 and 1 on the 2 others" in incident.explanation


def test_weights_that_are_the_same_and_those_of_which_none_is_usual(run_folder: Path) -> None:
    assert seen(_weights(run_folder, 3, lambda rank, step: 1.0)).replicas.apart == ()
    assert seen(_weights(run_folder.with_name("parts"), 3, lambda rank, step: float(rank))).replicas.apart == ()


def test_of_two_that_hold_other_weights_since_then_none_is_accused(run_folder: Path) -> None:
    _weights(run_folder, 2, lambda rank, step: 2.5 if (rank, step) == (1, 30) else 1.0)
    (incident,) = diagnose(run_folder).incidents
    assert (incident.cause, incident.rank, incident.also_on, incident.step) == (Cause.REPLICA_APART, 0, (1,), 30)
    assert "fc.weight reached 1 on rank 0 and 2.5 on rank 1" in incident.explanation
    assert "It cannot be told which" in incident.explanation


def test_what_too_few_finite_gradients_say_of_replicas(run_folder: Path) -> None:
    found = seen(job(run_folder, ranks=2, differs=lambda rank, step: {"grad_norm": math.nan, "skipped": True}))
    assert not found.replicas.compared
    assert ranks_story(found)[-1].startswith("Whether ranks are replicas is not known")


def test_of_one_rank_of_a_job_nothing_is_said_of_replicas(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder, rank=1, world_size=2)
    for step in range(40):
        trace.step(grad_norm=1.5 + math.sin(step))
    trace.close()
    here, missing, *others = ranks_story(seen(run_folder))
    assert here == "1 of 2 ranks is in this trace."
    assert missing.startswith("Nothing is there of rank 0")
    assert not any("replicas" in sentence for sentence in others)


def test_steps_after_one_that_was_written_are_no_origins(run_folder: Path) -> None:
    for rank in range(2):
        trace = TraceBuilder(run_folder, rank=rank, world_size=2)
        for step in range(40):
            bad = step >= 30
            trace.step(grad_norm=math.nan if bad else 1.5 + math.sin(step), skipped=False)
            if bad:
                own = ReplayStatus.EXACT if rank == 1 or step > 30 else ReplayStatus.RECEIVED
                trace.incident(step=step, replay=own)
        trace.close()
    found = seen(run_folder)
    assert [state.origins for state in found.states] == [0, 1]
    assert found.grid.cells[:, 30].tolist() == [CellState.RECEIVED, CellState.ORIGIN]
    assert (found.grid.cells[:, 31:] == CellState.AFTERMATH).all()
    assert bad_rows(found.bad) == [("30", "rank 1", "rank 0"), ("31 to 39", "bad weights since step 30", "")]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("since", [3, 15, 16, 39])
def test_since_when_weights_differ_is_found_among_all_traced_steps(run_folder: Path, ranks: int, since: int) -> None:
    every_third = range(0, 40, 3)
    _weights(run_folder, ranks, lambda rank, step: 2.5 if rank == 1 and step >= since else 1.0, every_third)
    (apart,) = seen(run_folder).replicas.apart
    first = next(step for step in every_third if step >= since)
    assert (apart.step, apart.agreed_at, apart.last_step) == (first, first - 3, 39)
    (incident,) = diagnose(run_folder).incidents
    assert f"At step {first - 3} they still were." in incident.explanation
