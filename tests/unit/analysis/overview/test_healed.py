"""Whether a failure has come back since the run was resumed, or it was healed, beside other failures."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ampscope import diagnose
from ampscope.trace.schema import EventKind, Trigger
from tests.support.trace_builder import TraceBuilder
from tests.support.traced_steps import FULL, INF, Step

STEPS = 20


def fails(trace: TraceBuilder, step: int, module: str) -> None:
    traced = Step(trace, step=step)
    raised = traced.op("exp", traced.entry(out=(0.0, 100.0), dtype=FULL), out=(1.0, INF), dtype=FULL, module=module)
    traced.loss(traced.op("mean", raised, out=(INF, INF), dtype=FULL))
    trace.incident(step=step, trigger=Trigger.NONFINITE_LOSS, loss=INF)


def since(
    folder: Path,
    failures: dict[int, str],
    *,
    resumed: tuple[int, ...] = (),
    healed: tuple[int, ...] = (),
) -> str:
    """What is told of a run of 20 steps in which modules fail at steps."""
    trace = TraceBuilder(folder)
    for step in range(STEPS):
        trace.step(loss=math.inf if step in failures else 2.0)
    for step, module in failures.items():
        fails(trace, step, module)
    for step in resumed:
        trace.event(EventKind.RESUME, "torch", step=step)
    for step in healed:
        trace.event(
            EventKind.CURE, json.dumps({"kind": "modules_fp32", "modules": [failures.get(step, "")]}), step=step
        )
    return diagnose(trace.close()).since


@pytest.mark.parametrize(
    ("failures", "resumed", "told"),
    [
        ({3: "a"}, (), ""),
        (
            {3: "a"},
            (6,),
            "The run was resumed at step 6, and the failure has not come back in the 14 steps since, 70 % of the run.",
        ),
        ({3: "a", 9: "a"}, (6,), "The run was resumed at step 6, and the failure has come back since: at step 9."),
        (
            {3: "a", 9: "a"},
            (6, 15),
            "resumed at step 15, and the failure has not come back in the 5 steps since, 25 % of the run.",
        ),
        ({3: "a", 9: "b"}, (6,), "since, 70 % of the run; another failure came at step 9."),
        ({3: "a", 4: "b"}, (6,), "since, 70 % of the run."),
        ({3: "a"}, (20,), ""),
    ],
)
def test_of_a_resumed_run(failures: dict[int, str], resumed: tuple[int, ...], told: str, run_folder: Path) -> None:
    found = since(run_folder, failures, resumed=resumed)
    assert found.endswith(told)
    assert bool(found) == bool(told)


@pytest.mark.parametrize(
    ("failures", "healed", "told"),
    [
        (
            {3: "a"},
            (3,),
            "Healing changed the training at step 3, and the failure has not come back in the 16 steps since, 80 % of",
        ),
        (
            {3: "a", 9: "a"},
            (3,),
            "Healing changed the training at step 3, and the failure has come back since: at step 9.",
        ),
        ({3: "a", 9: "b"}, (3, 9), "since, 80 % of the run; another failure came at step 9."),
        ({3: "a", 9: "b"}, (9,), ""),
        ({3: "a", 6: "b", 9: "a"}, (6,), ""),
    ],
)
def test_of_a_healed_run(failures: dict[int, str], healed: tuple[int, ...], told: str, run_folder: Path) -> None:
    found = since(run_folder, failures, healed=healed)
    assert told in found
    assert bool(found) == bool(told)
