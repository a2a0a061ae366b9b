"""The step that went bad, run again with a cure: its gradients and buffers take the place of the bad ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.changes.replay_change import ReplayChange
from ampscope.capture.events import StepAttempt
from ampscope.capture.heal import repairs
from ampscope.capture.heal.lasting_cure import LastingCure
from ampscope.capture.heal.repairs import Poisoned
from ampscope.capture.isolation.state_snapshot import StateSnapshot
from ampscope.capture.rerun.engine import Rerun, RerunEngine
from ampscope.capture.rerun.player import Player
from ampscope.capture.tape.tape_entry import Entry, EntryKind, GradientOf, UnscaledGradients, unscale_
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.tracing.light_statistics import can_be_bad, finite
from ampscope.trace.schema import CureKind, Trial

#: Why gradients are not handed over that the loop may have decided on.
DECIDED_BY_THEM = "the loop read numbers of its gradients, and changed these after that"


class Buffer(NamedTuple):
    """A buffer or a plain attribute, by its module and its name: a forward may put another tensor in its place."""

    module: nn.Module
    name: str
    tensor: Tensor | None  #: that it was when the step began
    value: Tensor  #: that the step has left


@dataclass(frozen=True, slots=True)
class CuredStep:
    """The outcome of a step that was run again with a cure."""

    reason: str = ""  #: why it is of no use; empty where it is finite
    was_run: bool = False  #: it could be run again, finite or not
    gradients: dict[str, Tensor] = field(default_factory=dict)  #: by parameter, as backward and the loop left them
    buffers: list[Buffer] = field(default_factory=list)  #: of the model, as it has left them
    unscaled: bool = False  #: the gradients are free of the loss scale
    hooked: str = ""  #: a parameter whose gradient a function of the loop's own has changed, perhaps
    seconds: float = 0.0


class Handed(Enum):
    """The fate of the step of an attempt that went bad."""

    NOTHING = auto()  #: what would have become of it
    REPLACED = auto()  #: its gradients are finite now: its optimizer is to step
    LEFT_OUT = auto()  #: it is left out


@dataclass(slots=True)
class HealingPlan:
    """Describes what is to be done about a bad step, and what has become of it."""

    attempt: StepAttempt
    kind: CureKind
    text: str
    recording: TapedStep
    change: ReplayChange = field(default_factory=ReplayChange)  #: with which the step comes out finite
    cure: LastingCure | None = None
    cured: CuredStep | None = None  #: the step with it, if that was run
    poisoned: Poisoned = field(default_factory=dict)
    handed: Handed = Handed.NOTHING
    why_not: str = ""  #: its gradients were not handed over
    restored: bool = False  #: buffers that it has spoilt hold finite values again
    has_ended: bool = False  #: the optimizer has returned, or was skipped
    is_told: bool = False  #: another optimizer of the same step had it first
    is_finite: bool = False  #: and goes on as it is: what it lost is not known to be worth more

    @property
    def is_repair(self) -> bool:
        """Whether it gives the model values back, whatever becomes of the step."""
        return bool(self.poisoned) or self.kind is CureKind.WEIGHTS


def run(engine: RerunEngine, step: TapedStep, change: ReplayChange) -> CuredStep:
    """Runs a step with a change, and takes what came out."""
    buffers: list[Buffer] = []
    gradients: dict[str, Tensor] = {}
    hooked = ""

    def sink(player: Player) -> None:
        nonlocal hooked
        gradients.update(player.gradients())
        left = player.substitutes.left
        buffers.extend(Buffer(module, name, step.state.buffer(module, name), value) for module, name, value in left)
        hooked = player.hooked

    ran = engine.run(Rerun(step, change, sink=sink))
    if ran.reason:
        return CuredStep(ran.reason)
    if ran.outcome is not Trial.FINITE or any(_is_spoilt(step.state, each) for each in buffers):
        return CuredStep("it is not finite with the cure either", True, seconds=ran.seconds)
    return CuredStep("", True, gradients, buffers, _is_unscaled(step), hooked, ran.seconds)


def _is_spoilt(state: StateSnapshot, buffer: Buffer) -> bool:
    """Whether a buffer was finite before the step, and is not any more."""
    if not can_be_bad(buffer.value) or finite(buffer.value):
        return False
    if buffer.tensor is None:
        return True
    before = state.at_start(buffer.tensor)  # None for a large one that never changes, as a mask
    return before is not None and finite(before)


def _is_unscaled(step: TapedStep) -> bool:
    return any(isinstance(entry.arguments, UnscaledGradients) for _, entry in step.entries())


def why_not_handed_over(step: TapedStep, optimizer: Optimizer, models: Models, *, averages: bool = False) -> str:
    """Why the gradients of a replay must not take the place of the step's own, in words; empty where they may.

    Args:
        step: The step.
        optimizer: Whose gradients they are.
        models: The watched models.
        averages: Those of all ranks are going to be put together as the step's own were.
    """
    stepped = OptimizerView(optimizer).parameters
    foreign = any(id(parameter) not in models.parameters for parameter in stepped)
    had = any(models.parameters[id(each)][0] in step.had_gradients for each in stepped if id(each) in models.parameters)
    of_ranks = step.has_received() or (step.reduction() is not None and not averages)
    reasons: dict[str, bool] = {
        "gradients were there before the step, which a replay does not have": had,
        "its gradients were put together with those of other ranks": of_ranks,
        "weights have moved since": step.late or step.moved or step.after_unjudged or step.updates != (),
        "its optimizer steps weights that are not watched": foreign,
        DECIDED_BY_THEM: _decided_by_gradients(step),
        "the loop changed gradients between two backward passes": _changed_between(step),
        "the step left what is not finite in what an attribute of a module holds": not all(map(finite, _held(step))),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _held(step: TapedStep) -> Iterator[Tensor]:
    """Yields the tensors in the modules' attributes that no replay gives back."""
    return (held.tensor for held in step.state.held.now() if held.is_nested or not step.state.keeps_before)


def _changed_between(step: TapedStep) -> bool:
    """Whether the loop wrote into gradients before the last backward, which a replay does not do."""
    written = (number for number, entry in enumerate(step.tape.entries, step.tape.start) if _writes_gradients(entry))
    last = max((number for number, entry in step.entries() if entry.kind is EntryKind.BACKWARD), default=step.since)
    return any(step.since <= number < last for number in written)


def _writes_gradients(entry: Entry) -> bool:
    return entry.in_place and any(isinstance(each, GradientOf) for each in entry.arguments.tensors)


def _decided_by_gradients(step: TapedStep) -> bool:
    """Whether the loop may have changed gradients by numbers that were bad."""
    made_at = step.gradients_at
    reads = [at for at, made in step.tape.results.given_to_python if made is None or made > made_at]
    return any(number >= at for at in reads for number in step.edits)


def hand_over(
    cured: CuredStep,
    optimizer: Optimizer,
    models: Models,
    scale: Tensor | None,
    why_not: Callable[[Tensor | None], str],
) -> str:
    """Gives the gradients and buffers of a cured step to the training.

    Args:
        cured: The step.
        optimizer: Whose gradients take the place of the bad ones.
        models: The watched models.
        scale: The loss scale of the step; None without a scaler.
        why_not: Says why the step must not be made with gradients of a norm.

    Returns:
        Why that cannot be; then nothing was changed. Empty where it was done.
    """
    if cured.hooked:
        return f"a function of the loop's own may change the gradient of {cured.hooked}, and a replay runs none"
    pairs = list(_pairs(cured, optimizer, models))
    if any(new is None or not _fits(old, new) for old, new in pairs):
        return "another set of parameters has gradients when it is run again"
    with torch.no_grad():
        new = [each.detach().to(old.dtype, copy=True) for old, each in pairs if each is not None]
        if scale is not None and not cured.unscaled:
            unscale_(new, scale)
        if not all(map(finite, new)):
            return "its gradients are not finite once they are free of the loss scale"
        norms = [torch.linalg.vector_norm(each, dtype=torch.float64).cpu() for each in new]
        reason = why_not(torch.linalg.vector_norm(torch.stack(norms)) if norms else None)
        if reason:
            return reason
        for (old, _), each in zip(pairs, new, strict=True):
            old.copy_(each)
        for buffer in cured.buffers:
            repairs.give_value(*buffer)
    return ""


def _pairs(cured: CuredStep, optimizer: Optimizer, models: Models) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The gradient of each parameter that has one, and the one to take its place."""
    for parameter in OptimizerView(optimizer).parameters:
        name, _ = models.parameters[id(parameter)]
        new = cured.gradients.get(name)
        if parameter.grad is not None or new is not None:
            yield (parameter.grad if parameter.grad is not None else parameter), new


def _fits(old: Tensor, new: Tensor) -> bool:
    plain = type(old) is Tensor and type(new) is Tensor
    dense = old.layout is torch.strided and new.layout is torch.strided
    return plain and dense and old.shape == new.shape
