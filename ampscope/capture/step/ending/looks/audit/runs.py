"""The two executions of an audited step: in the reference dtype for comparison, and as it was, op by op."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.replay import memory, player, step_replay
from ampscope.capture.replay.changes import EverythingIn, ReplayChange
from ampscope.capture.replay.player import Player
from ampscope.capture.replay.tape.entry import Entry
from ampscope.capture.replay.tape.taped_step import TapedStep
from ampscope.capture.step.ending.looks.audit.op_errors import OpErrors
from ampscope.capture.step.ending.looks.audit.reference import ReferenceSamples, sampled
from ampscope.capture.torch_support.calls.backward_call import creates_graph
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.local_shards import local
from ampscope.capture.torch_support.models import Models
from ampscope.capture.tracing.sites import Sites
from ampscope.capture.tracing.tracer import Tracer

#: Beside what the step itself keeps, the errors of all that its forward gives are kept until backward has come by.
_SHARE_OF_ROOM = 2
FAILED = "the audit itself failed; the run's events say why"


class Reference(NamedTuple):
    """The step in the reference dtype."""

    samples: ReferenceSamples | None = None  #: None where it could not be run
    gradients: Mapping[str, Tensor | None] = {}  #: a sample of each parameter's; scaled where the step is
    loss: float | None = None  #: likewise
    reason: str = ""  #: why it could not be run


class Faithful(NamedTuple):
    """The step as it was."""

    errors: OpErrors
    tracer: Tracer
    player: Player
    reason: str = ""  #: why it could not be run

    def release(self) -> None:
        """Lets go of every tensor."""
        self.errors.release()
        self.tracer.release()


class MeasuredPlayer(Player):
    """Plays a step whose ops are measured: the gradients of the loss tell what their errors do to it."""

    errors: OpErrors

    def _play_entry(self, index: int, entry: Entry) -> None:
        self.errors.settle()
        args, kwargs = entry.arguments.args, entry.arguments.kwargs
        gives = bool(self._step.given) and entry.call is torch.autograd.grad
        self.errors.counts = gives and not creates_graph(args, kwargs)
        try:
            super()._play_entry(index, entry)
        finally:
            self.errors.counts = False

    def _backward(self, entry: Entry, args: Any, kwargs: Any) -> None:
        self.errors.settle()
        self.errors.counts = not creates_graph(args, kwargs)  # else they are a step on the way to the loss
        try:
            super()._backward(entry, args, kwargs)
        finally:
            self.errors.counts = False


def reference(step: TapedStep, models: Models, dtype: torch.dtype, guard: Guard) -> Reference:
    """Runs the step in a wider dtype; nothing of it is recorded.

    Args:
        step: The step.
        models: The watched models.
        dtype: In place of every narrower one.
        guard: Catches faults of the tracer.
    """
    change, device = EverythingIn(dtype), models.main_device()
    if not memory.fits(memory.of_weights(models, change.dtype), device):
        return Reference(reason=memory.NO_ROOM)
    tracer = Tracer(Sites(0, models.module_type), models.names, full=True, guard=guard, stops=_stops())
    tracer.keeper = samples = ReferenceSamples(tracer)
    played = Player(step, models, tracer, change)
    failed = step_replay.play(played, memory.room(device))
    try:
        if failed or guard.broken:
            return Reference(reason=failed or FAILED)
        if played.draws.missed and not step.draws:  # once more, for what it draws is not known before it has been run
            as_it_was = Tracer(Sites(0, models.module_type), models.names, full=False, guard=guard, stops=_stops())
            step_replay.play(Player(step, models, as_it_was, ReplayChange()), memory.room(device))
            as_it_was.release()
            if step.draws:
                return reference(step, models, dtype, guard)
        gradients = {name: sampled(local(each)) for name, each in played.gradients().items()}
        return Reference(samples, gradients, total(played.losses))
    finally:
        tracer.release()


def faithful(
    step: TapedStep,
    models: Models,
    of: Reference,
    dtype: torch.dtype,
    sites: Sites,
    *,
    guard: Guard,
    names: Iterable[str],
) -> Faithful:
    """Runs the step as it was, and measures each of its ops.

    Args:
        step: The step.
        models: The watched models.
        of: What to compare with.
        dtype: Of the reference, in which each op is run again.
        sites: Numbers the program points.
        guard: Catches faults of the tracer.
        names: Parameters whose gradients are marked in the trace.
    """
    tracer = Tracer(sites, models.names, full=True, guard=guard, stops=_stops())
    tracer.keeper = errors = OpErrors(tracer, of.samples, dtype, guard)
    played = MeasuredPlayer(step, models, tracer, ReplayChange(), asked_for=frozenset(names))
    played.errors = errors
    room = memory.room(models.main_device())
    failed = step_replay.play(played, None if room is None else room // _SHARE_OF_ROOM)
    return Faithful(errors, tracer, played, failed)


def total(losses: Sequence[Tensor]) -> float | None:
    """The sum of losses; None where one has several elements, or where there is none."""
    alone = all(loss.numel() == 1 for loss in losses)
    return math.fsum(loss.item() for loss in losses) if losses and alone else None


def _stops() -> Any:
    return (player.call_user.__code__,)
