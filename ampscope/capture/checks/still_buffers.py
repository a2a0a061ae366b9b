"""Notices buffers in half precision whose updates are rounded away: running statistics that never leave their start.

At a few steps the buffers are compared with what they were when the step began. Where one has not moved, two replays in
float32 tell where it should have moved, and towards what. One that has come to its end moves to and fro in float32; one
that is rounded away moves the same way each time, and is far from where it is heading.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ampscope.capture.changes.replay_change import EverythingIn
from ampscope.capture.checks.check import Asks, Check, CheckContext, CheckFinding
from ampscope.capture.events import StepAttempt
from ampscope.capture.isolation.state_snapshot import StateSnapshot
from ampscope.capture.loop_state.state_watch import is_due
from ampscope.capture.loop_state.stillness import MOST_STILL, READINGS, Stillness, enlarged, movement_of
from ampscope.capture.rerun.engine import Ran, Rerun
from ampscope.capture.rerun.player import Player
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support.tensor_tree import HALF
from ampscope.trace.evidence import Evidence
from ampscope.trace.schema import Trigger


class _LargerBuffers(StateSnapshot):
    """A snapshot some of whose tensors are larger than they were.

    Args:
        snapshot: As they were.
        larger: ``id`` of those.
    """

    def __init__(self, snapshot: StateSnapshot, larger: set[int]) -> None:
        self.__dict__.update(snapshot.__dict__)
        self._larger = larger

    def at_start(self, tensor: Tensor) -> Tensor | None:
        """See `StateSnapshot.at_start`."""
        found = super().at_start(tensor)
        return enlarged(found) if found is not None and id(tensor) in self._larger else found


class StillBuffers(Check):
    """Looks at the buffers in half precision of some good steps, before the weights move."""

    free_looks = READINGS

    def __init__(self, context: CheckContext) -> None:
        super().__init__(context)
        self._readings: dict[str, Stillness] = {}
        self._told: set[str] = set()

    def due(self, attempt: StepAttempt) -> Asks | None:
        """Whether the turn has come, and a buffer stands still."""
        if not is_due(attempt.step):
            return None
        half = {name: buffer for name, buffer in self._half() if name not in self._told}
        if not half:
            return None
        recording = self.tape.recording()
        still = {name: buffer for name, buffer in half.items() if _stands_still(buffer, recording)}
        for name in self._readings.keys() - still.keys():
            del self._readings[name]
        return self._asks(attempt, recording, still) if still and not recording.has_received() else None

    def _asks(self, attempt: StepAttempt, recording: TapedStep, still: Mapping[str, Tensor]) -> Asks:
        """Runs the step twice in float32, the second time from larger buffers: where they move, and towards what."""
        runs: list[dict[str, tuple[Tensor, Tensor]]] = []
        larger = recording._replace(state=_LargerBuffers(recording.state, set(map(id, still.values()))))

        def sink(player: Player) -> None:
            runs.append({name: pair for name, pair in player.buffers_moved() if name in still})

        for step in recording, larger:
            ran: Ran = yield Rerun(step, EverythingIn(torch.float32), sink=sink)
            if ran.reason:
                return None
        once, again = runs
        for name in still.keys() & once.keys() & again.keys():
            known = self._readings.setdefault(name, Stillness(still[name].dtype))
            known.read(attempt.step, still[name], movement_of(*once[name], *again[name]))
        lost = [name for name in still if name in self._readings and self._readings[name].is_lost]
        self._told.update(lost)
        found = tuple(self._readings.pop(name).described(name) for name in lost)
        return CheckFinding(Trigger.BUFFER_STANDS_STILL, Evidence(still=found), recording) if found else None

    def _half(self) -> list[tuple[str, Tensor]]:
        return [
            (".".join(filter(None, (module, name))), buffer)
            for module, name, buffer in self.engine.models.buffers()
            if buffer.dtype in HALF and type(buffer) is Tensor and buffer.numel()
        ]


def _stands_still(buffer: Tensor, step: TapedStep) -> bool:
    """Whether nearly all of a buffer is as it was when the step began; waits for the device."""
    before = step.state.at_start(buffer)
    return before is not None and float((before == buffer).float().mean()) >= MOST_STILL
