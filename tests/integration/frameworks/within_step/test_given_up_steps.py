"""A loop that stops at a bad loss by itself has a problem, and is told which, though no optimizer saw that step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ampscope import diagnose
from ampscope.trace.vocabulary import Cause
from tests.integration.frameworks.within_step.giving_up import PLACES, loop
from tests.support.primary import primary_incident
from tests.support.training.small_loop import POISONED, STEPS
from tests.support.training.twin_runs import EXACT, train_both

pytestmark = pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")


@pytest.mark.parametrize("step_of", PLACES)
def test_the_step_that_a_loop_gives_up_is_judged(step_of: Callable[..., None], run_folder: Path) -> None:
    watched = train_both(partial(loop, step_of=step_of, bad=True), run_folder)
    primary = primary_incident(watched.run)
    assert diagnose(watched.run).verdict == "problem"
    assert (primary.cause, primary.op, primary.module) == (Cause.LOG_ZERO, "aten.log.default", "1")
    assert watched.replay_of(POISONED) == EXACT
    assert len(watched.steps) == POISONED
    assert watched.warnings == []


@pytest.mark.parametrize("step_of", PLACES)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_a_loop_that_never_stops_is_healthy(step_of: Callable[..., None], run_folder: Path) -> None:
    watched = train_both(partial(loop, step_of=step_of, bad=False), run_folder)
    assert diagnose(watched.run).verdict == "healthy"
    assert len(watched.steps) == STEPS
    assert (watched.incidents, watched.warnings) == ([], [])
