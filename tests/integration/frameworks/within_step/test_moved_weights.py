"""What goes wrong before a loop moves its weights in mid-step is found there, not in the weights that it made."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from ampscope import diagnose
from ampscope.trace.schema import ReplayStatus
from ampscope.trace.vocabulary import Cause
from tests.integration.frameworks.within_step import moving_loops
from tests.integration.frameworks.within_step.moving_loops import LOOPS
from tests.support.primary import primary_incident
from tests.support.training.small_loop import POISONED, STEPS
from tests.support.training.twin_runs import train_both


@pytest.mark.parametrize("name", LOOPS)
def test_the_op_in_the_pass_where_it_was_born(name: str, run_folder: Path) -> None:
    watched = train_both(partial(LOOPS[name], bad=True), run_folder)
    primary = primary_incident(watched.run)
    assert (primary.cause, primary.op, primary.module) == (Cause.LOG_ZERO, "aten.log.default", "1")
    assert (primary.step, primary.replay) == (POISONED, ReplayStatus.EXACT)
    assert [row.step for row in watched.incidents].count(POISONED) == 1
    assert [row.step for row in watched.steps] == list(range(STEPS))
    assert watched.warnings == []


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_in_which_nothing_goes_wrong_is_healthy(name: str, run_folder: Path) -> None:
    watched = train_both(partial(LOOPS[name], bad=False), run_folder)
    assert diagnose(watched.run).verdict == "healthy"
    assert [row.micro_batches for row in watched.steps] == [2] * STEPS
    assert (watched.findings, watched.warnings) == ([], [])


def test_an_inner_step_by_hand_is_judged_before_it_moves_the_weights(run_folder: Path) -> None:
    watched = train_both(partial(moving_loops.inner_step_by_grad, bad=True), run_folder)
    primary = primary_incident(watched.run)
    assert (primary.cause, primary.op, primary.module) == (Cause.LOG_ZERO, "aten.log.default", "1")
    assert (primary.step, primary.replay) == (POISONED, ReplayStatus.EXACT)
    assert torch._C._len_torch_function_stack() == 0  # what was traced ended inside a function that it saw


def test_an_inner_step_by_hand_does_no_harm(run_folder: Path) -> None:
    watched = train_both(partial(moving_loops.inner_step_by_grad, bad=False), run_folder)
    assert diagnose(watched.run).verdict == "healthy"
