"""Notices mistakes in how the scaler and autocast are used, from the order of events and version counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.torch_support.user_line import Place, user_place
from ampscope.capture.usage.gradient_edits import Edits
from ampscope.capture.usage.gradient_scales import UNSCALED, CarriedScales, ScaledRoots
from ampscope.capture.usage.scale_degree import Power
from ampscope.capture.usage.scaler_handover import Succession
from ampscope.capture.usage.scheduler_steps import Schedules
from ampscope.trace.vocabulary import Cause, MistakeForm


class Report(Protocol):
    """Takes a mistake."""

    def __call__(
        self,
        cause: Cause,
        place: Place | None,
        evidence: dict[str, Any],
        step: int | None = None,
        form: MistakeForm | None = None,
    ) -> None:
        """Writes it down: its cause, the user's line, evidence, its step where it is not the present one, its form."""


@dataclass(slots=True)
class _Window:
    """What happened to one scaler since its last ``update``."""

    unscaled: dict[int, Place | None] = field(default_factory=dict)  #: optimizers, by id
    stepped: set[int] = field(default_factory=set)
    backward_since: bool = False  #: since the last ``unscale_``


class UsageWatch:
    """Follows one run's loop.

    Args:
        models: The watched models.
        report: Called with each mistake.
        step_of: Gives the number of the step an optimizer (None: the first) is working on.
    """

    def __init__(self, models: Models, report: Report, step_of: Callable[[Optimizer | None], int]) -> None:
        self._models = models
        self._report = report
        self._step_of = step_of
        self._roots = ScaledRoots()
        self._carried = CarriedScales(models)
        self._edits = Edits(self._gradients, lambda: step_of(None))
        self._succession = Succession()
        self._schedules = Schedules()
        self._windows: dict[int, _Window] = {}  # by number of the scaler
        self._scaled = False  # gradients hold a scale, a scaler's or one of the loop's own
        self._unscaled_at: Place | None = None
        self._updated: Place | None = None  # by which line, since the last ``unscale_``
        self._updates_since_backward: dict[int, Place | None] = {}  # by number of the scaler
        self._now = 0  # step of the optimizer in question
        self._last_step = 0  # the latest step that was attempted
        self._checked: set[int] = set()  # ids of optimizers whose gradients' dtype was looked at

    def _gradients(self) -> Iterator[Tensor]:
        return (p.grad for _, p in self._models.parameters.values() if p.grad is not None)

    # -- forward and backward -----------------------------------------------------------------------------------

    def new_iteration(self) -> None:
        """A watched forward begins after a step."""
        self._roots.clear()
        self._edits.new_iteration()
        self._scaled = False

    def before_backward(self, roots: list[Tensor], *, under_autocast: bool, several: bool) -> None:
        """A backward begins.

        Args:
            roots: What it starts from.
            under_autocast: Whether an autocast region is open.
            several: Whether to tell apart which parameters it reaches: there may be optimizers without a scaler.
        """
        if under_autocast:
            self._report(Cause.MISUSE_BACKWARD_UNDER_AUTOCAST, user_place(), {})
        scalers = self._roots.scalers_of(roots)
        by_hand = scalers == UNSCALED and any(self._edits.power_of(root).degree == 1 for root in roots)
        if by_hand and self._windows:
            scalers = frozenset(self._windows) if len(self._windows) == 1 else frozenset()
        self._scaled = self._scaled or by_hand or scalers != UNSCALED
        self._carried.before_backward(scalers, several=several or len(self._windows) > 1)
        self._updates_since_backward.clear()
        for window in self._windows.values():
            window.backward_since = True

    def after_backward(self) -> None:
        """A backward has added to the gradients."""
        if self._carried.after_backward() and self._scaled:
            self._report(Cause.MISUSE_UPDATE_EACH_MICROBATCH, self._updated or self._unscaled_at, {})
        self._edits.backward_done()

    def saw_function(
        self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any, *, after_backward: bool
    ) -> None:
        """A torch function ran outside the models."""
        if func is torch.autograd.grad:
            if self._roots.scalers_of(args[0]) != UNSCALED:
                self._edits.scaled_anew(result)
            return
        if not self._windows and not after_backward:
            self._edits.multiplied(func, args)
        self._edits.saw(func, args, kwargs, result, after_backward=after_backward and self._scaled)

    # -- the scaler ---------------------------------------------------------------------------------------------

    def new_scaler(self, scaler: int, *, fresh: bool) -> None:
        """The run has got a scaler with this number; ``fresh`` when it has scaled nothing and loaded no state yet."""
        self._windows[scaler] = _Window()
        self._succession.joined(scaler, fresh=fresh)

    def scaled_by(self, scaler: int, inputs: list[Tensor], outputs: Any, scale: Tensor | None) -> None:
        """A scaler has scaled losses.

        Args:
            scaler: Its number.
            inputs: The losses.
            outputs: What it returned.
            scale: The tensor it keeps its scale in.
        """
        self._roots.scaled(scaler, outputs)
        self._edits.scale_tensor(scale)
        self._succession.scales(scaler, scale)
        if any(_depends(self._edits.power_of(loss)) for loss in inputs):
            self._now = self._step_of(None)
            self._tell(Cause.MISUSE_NO_UNSCALE, MistakeForm.LOSS_OF_SCALED_GRADIENTS)

    def scale_read(self, scale: float) -> None:
        """The loop asked a scaler for its scale."""
        self._edits.scale_read(scale)

    def before_unscale(self, scaler: int, optimizer: Optimizer, *, by_loop: bool) -> None:
        """``unscale_`` is about to divide the gradients (called by the loop or by ``step``)."""
        self._now = self._step_of(optimizer)
        parameters = _parameters(optimizer)
        mistake = self._edits.take()
        if mistake is not None:
            step = self._now if mistake.step is None else mistake.step
            self._report(mistake.cause, mistake.place, {}, step, mistake.form)
        elif self._edits.unscaled_by_hand(p.grad for p in parameters if p.grad is not None):
            self._report(Cause.MISUSE_NO_UNSCALE, self._edits.unscaled_at, {}, self._now, MistakeForm.UNSCALED_BY_HAND)
        if by_loop:
            self._check_again(self._windows.setdefault(scaler, _Window()), optimizer)
        self._check_carried(scaler, parameters)
        self._check_half(optimizer)
        self._check_succession(scaler, optimizer)

    def _tell(self, cause: Cause, form: MistakeForm) -> None:
        """Reports a mistake of the line that runs now."""
        self._report(cause, user_place(), {}, self._now, form)

    def _check_again(self, window: _Window, optimizer: Optimizer) -> None:
        """A second ``unscale_`` before ``update``, which torch refuses."""
        if id(optimizer) in window.stepped:
            self._tell(Cause.MISUSE_MULTIPLE_SCALERS_UPDATE, MistakeForm.UPDATE_MISSING)
        elif id(optimizer) in window.unscaled:
            again = window.backward_since
            cause = Cause.MISUSE_UPDATE_EACH_MICROBATCH if again else Cause.MISUSE_MULTIPLE_SCALERS_UPDATE
            self._tell(cause, MistakeForm.UNSCALE_EACH_MICROBATCH if again else MistakeForm.UNSCALE_TWICE)

    def _check_carried(self, scaler: int, parameters: list[Tensor]) -> None:
        """Whether the gradients carry the scale of this scaler, as it is now, and no other."""
        carried = self._carried.of(parameters)
        if not carried or self._carried.is_unscaled(parameters):
            return
        if scaler in self._updates_since_backward:
            place = self._updates_since_backward[scaler]
            self._report(Cause.MISUSE_MULTIPLE_SCALERS_UPDATE, place, {}, self._now, MistakeForm.UPDATE_IN_BETWEEN)
        elif None in carried:
            self._tell(Cause.MISUSE_MISSING_SCALER, MistakeForm.LOSS_NOT_SCALED)
        elif carried != {scaler}:
            self._tell(Cause.MISUSE_MULTIPLE_SCALERS_UPDATE, MistakeForm.ANOTHER_SCALER)

    def _check_half(self, optimizer: Optimizer) -> None:
        """A scaler cannot unscale gradients that are float16 themselves: their parameters are."""
        if id(optimizer) in self._checked:
            return
        self._checked.add(id(optimizer))
        half = [p for p in _parameters(optimizer) if p.grad is not None and p.grad.dtype is torch.float16]
        if half:
            self._report(Cause.HALF_PARAMS, user_place(), {"parameters": len(half)}, self._now)

    def _check_succession(self, scaler: int, optimizer: Optimizer) -> None:
        found = self._succession.serves(scaler, optimizer, self._step_of(None), user_place())
        if found is not None:
            self._report(Cause.MISUSE_SCALER_STATE_NOT_RESTORED, found.place, found.evidence, found.step)

    def after_unscale(self, scaler: int, optimizer: Optimizer) -> None:
        """The gradients are unscaled now."""
        self._unscaled_at, self._updated = user_place(), None
        self._carried.unscaled(_parameters(optimizer))
        window = self._windows.setdefault(scaler, _Window())
        window.unscaled[id(optimizer)] = self._unscaled_at
        window.backward_since = False

    def before_step(self, scaler: int, optimizer: Optimizer, *, on_device: bool) -> None:
        """``scaler.step`` begins; torch refuses a second one before ``update``.

        Args:
            scaler: The scaler's number.
            optimizer: The optimizer.
            on_device: Whether the optimizer unscales by itself, without ``unscale_``.
        """
        window = self._windows.setdefault(scaler, _Window())
        self._now = self._step_of(optimizer)
        if id(optimizer) in window.stepped:
            self._tell(Cause.MISUSE_MULTIPLE_SCALERS_UPDATE, MistakeForm.UPDATE_MISSING)
        elif on_device and id(optimizer) not in window.unscaled:
            self.before_unscale(scaler, optimizer, by_loop=False)

    def after_step(self, scaler: int, optimizer: Optimizer) -> None:
        """``scaler.step`` is over."""
        window = self._windows.setdefault(scaler, _Window())
        window.stepped.add(id(optimizer))
        window.unscaled.setdefault(id(optimizer), None)  # a fused optimizer unscales by itself

    def before_update(self, scaler: int, *, by_hand: bool) -> None:
        """``update`` begins; torch refuses one that follows no step."""
        window = self._windows.get(scaler)
        if window is not None and not window.unscaled and not by_hand:
            micro, several = Cause.MISUSE_UPDATE_EACH_MICROBATCH, Cause.MISUSE_MULTIPLE_SCALERS_UPDATE
            self._now = self._step_of(None) if window.backward_since else self._last_step
            self._tell(micro if window.backward_since else several, MistakeForm.NOTHING_TO_UPDATE)

    def updated(self, scaler: int, place: Place | None) -> None:
        """``update`` was called at ``place``."""
        self._windows[scaler] = _Window()
        self._updates_since_backward[scaler] = self._updated = place

    def restored(self, scaler: int) -> None:
        """A scaler was given a saved state."""
        self._succession.restored(scaler)

    # -- the optimizer ------------------------------------------------------------------------------------------

    def bypassed(self, optimizer: Optimizer, *, half_forward: bool, has_scaler: bool) -> None:
        """``optimizer.step`` was called without the scaler."""
        parameters = _parameters(optimizer)
        by_hand = self._edits.unscaled_by_hand(p.grad for p in parameters if p.grad is not None)
        half_parameters = any(p.dtype is torch.float16 for p in parameters)  # no scaler takes these
        if by_hand:
            return
        self._now = self._step_of(optimizer)
        if self._holds_scale(parameters):
            self._tell(Cause.MISUSE_NO_UNSCALE, MistakeForm.STEPPED_PAST_SCALER)
        elif half_forward and not has_scaler and not half_parameters:
            self._tell(Cause.MISUSE_MISSING_SCALER, MistakeForm.NO_SCALER)

    def bypassed_late(self, optimizer: Optimizer) -> None:
        """The same, after another optimizer has ended the step."""
        if self._holds_scale(_parameters(optimizer)):
            self._now = self._last_step
            self._tell(Cause.MISUSE_NO_UNSCALE, MistakeForm.STEPPED_PAST_SCALER)
            self._carried.stepped(_parameters(optimizer))

    def _holds_scale(self, parameters: list[Tensor]) -> bool:
        return bool(self._carried.of(parameters) - UNSCALED) and not self._carried.is_unscaled(parameters)

    def stepped(self, optimizer: Optimizer, *, skipped: bool) -> None:
        """A step attempt of ``optimizer`` is over."""
        self._carried.stepped(_parameters(optimizer))
        self._last_step = self._step_of(optimizer)
        self._schedules.attempted(optimizer, self._last_step, skipped=skipped)

    def scheduled(self, scheduler: Any) -> None:
        """A learning rate scheduler steps."""
        step = self._schedules.stepped(scheduler)
        if step is not None:
            self._report(Cause.MISUSE_SCHEDULER_ORDER, user_place(), {}, step)


def _depends(power: Power) -> bool:
    """Whether a loss would be another one with another scale; a factor of the loop's own may just equal the scale."""
    return power.mixed is not None or (power.degree != 0 and not power.of_scale)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return list(OptimizerView(optimizer).parameters)
