"""What is claimed, each file a group of claims; `ALL` has them in the order of the harm they would do."""

from __future__ import annotations

from gpu_check.claim import Claim
from gpu_check.claims import (
    compiled_and_captured,
    exact_replays,
    extremes,
    late_values,
    memory,
    no_waiting,
    ranks,
    step_rows,
    training_unchanged,
)

ALL: tuple[Claim, ...] = (
    *training_unchanged.CLAIMS,
    *no_waiting.CLAIMS,
    *exact_replays.CLAIMS,
    *late_values.CLAIMS,
    *extremes.CLAIMS,
    *compiled_and_captured.CLAIMS,
    *memory.CLAIMS,
    *step_rows.CLAIMS,
    *ranks.CLAIMS,
)
