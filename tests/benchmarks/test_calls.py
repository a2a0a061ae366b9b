"""What watching adds to a step in calls of Python, held to what was measured: it is the same on every machine."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

#: Calls that watching may add to a step of a loop: what was measured and a few more.
MOST = {
    "scaler_clip": 1_000,
    "bf16_clip": 720,
    "bf16_clip_for_loop": 720,
    "scaler_log_norms": 1_010,
    "accumulate_4_clip": 2_430,
    "rl_soft_target": 930,
    "adamw_fused": 950,
}
#: Steps that are counted here, sooner than by the benchmark: what is learnt has been learnt by then, too.
STEPS = range(37, 43)


@pytest.fixture(scope="module")
def calls() -> Any:
    return importlib.import_module("calls")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_loop_that_clips_pays_no_more_than_one_that_does_not(calls: Any) -> None:
    added = [calls.added(calls.LOOPS[name], 79, STEPS)[1] for name in ("bf16", "bf16_clip")]
    assert added[1] < 1.1 * added[0]
    assert added[1] < MOST["bf16_clip"]


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("tensors", "most"), [(79, 15_200), pytest.param(295, 51_300, marks=pytest.mark.slow)])
def test_a_traced_step_pays_by_the_op(calls: Any, tensors: int, most: int) -> None:
    """With 79 parameter tensors it has 818 ops; what listening costs besides is in the figure."""
    assert calls.added(calls.LOOPS["scaler_clip_traced"], tensors, STEPS)[1] < most


@pytest.mark.slow
@pytest.mark.timeout(900)  # two trainings of some hundred steps, each call of theirs counted: minutes beside others
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MOST)
def test_a_step_costs_no_more_with_more_parameters(calls: Any, name: str) -> None:
    few, many = (calls.added(calls.LOOPS[name], tensors, STEPS)[1] for tensors in (79, 295))
    assert few < MOST[name]
    assert many < few + 50


def test_a_call_is_counted(calls: Any) -> None:
    def inner() -> None:
        """Does nothing."""

    def step() -> None:
        inner()
        inner()

    assert calls.counted(step) == 3
