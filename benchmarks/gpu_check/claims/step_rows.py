"""The rows of the steps are those of their own step."""

from __future__ import annotations

import torch

from gpu_check.claim import Claim, expect
from gpu_check.recorded import rows
from gpu_check.trainings import Loop, watch

STEPS = 20


def _own_rate(device: torch.device) -> str:
    loop = Loop(device, fused=True)
    scope = watch(loop)
    for _ in range(STEPS):
        loop.step()
    scope.close()
    recorded = [row["lr"] for row in rows(scope.folder, "steps")]
    expect(len(recorded) == STEPS, f"{len(recorded)} of {STEPS} steps were recorded")
    wrong = [step for step, rate in enumerate(loop.rates) if recorded[step] != rate]
    expect(not wrong, f"learning rates of other steps at steps {wrong}")
    return f"{STEPS} steps"


CLAIMS = (
    Claim("rates", "fused optimizer and a schedule: each step's row has the learning rate of its own step", _own_rate),
)
