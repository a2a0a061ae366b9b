"""Runs a good step again in float32 to learn where it moves the buffers, and how fast each follows what it averages."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from ampscope.capture.replay import memory, player, step_replay
from ampscope.capture.replay.changes import EverythingIn
from ampscope.capture.replay.player import Player
from ampscope.capture.replay.state.state_snapshot import StateSnapshot
from ampscope.capture.replay.tape.taped_step import TapedStep
from ampscope.capture.step.measures.stillness import LARGER, Movement, movement
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.tracing.sites import Sites
from ampscope.capture.tracing.tracer import Tracer


class Movements(NamedTuple):
    """The movements of buffers in a step that was run again in float32."""

    of: dict[str, Movement]  #: by qualified name; empty where the step could not be run again
    seconds: float


def in_float32(step: TapedStep, models: Models, names: frozenset[str], guard: Guard) -> Movements:
    """Runs ``step`` twice in float32, the second time from larger buffers.

    Args:
        step: The step, before its optimizer has moved the weights.
        models: The watched models.
        names: The buffers of interest.
        guard: Catches faults of the tracer.

    Returns:
        Where they move. Nothing of the training is different afterwards.
    """
    started = time.perf_counter()
    once = _after(step, models, names, guard)
    averages = {id(held) for module, key, held in models.buffers() if ".".join(filter(None, (module, key))) in names}
    larger = step._replace(state=_LargerBuffers(step.state, averages))
    again = _after(larger, models, names, guard) if once else {}
    found = {}
    for name, (before, after) in once.items():
        if name in again:
            found[name] = movement(before, after, *again[name])
    return Movements(found, time.perf_counter() - started)


def _after(step: TapedStep, models: Models, names: frozenset[str], guard: Guard) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns each buffer's values before and after the step, in float32; empty where it could not be run."""
    change, stops = EverythingIn(torch.float32), (player.call_user.__code__,)
    tracer = Tracer(Sites(0, models.module_type), models.names, full=False, guard=guard, stops=stops)
    replay = Player(step, models, tracer, change)
    failed = step_replay.why_not(step, models) or step_replay.play(replay, memory.room(models.main_device()))
    tracer.release()
    return {} if failed else {name: pair for name, pair in replay.buffers_moved() if name in names}


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
        if found is None or id(tensor) not in self._larger:
            return found
        return torch.where(found == 0, torch.ones_like(found), found * LARGER)
