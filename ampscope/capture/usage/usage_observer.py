"""Tells the usage check what happens in a step: which of its questions each event answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from ampscope.capture.events.calls import BackwardCall, BareStep, JoinedScaler, ScalerCall, ScalerMethod, StepStart
from ampscope.capture.events.observer import StepObserver
from ampscope.capture.events.open_step import EndedStep
from ampscope.capture.hooks import process_hooks
from ampscope.capture.torch_support import tensor_tree, torch_private
from ampscope.capture.torch_support.calls.backward_call import backward_seeds
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.user_line import user_place
from ampscope.capture.usage.mistake import Mistake, ReportMistake
from ampscope.capture.usage.usage_watch import UsageWatch
from ampscope.trace.vocabulary import Cause


class UsageObserver(StepObserver):
    """The usage check as an observer of steps.

    Args:
        usage: The check.
        report: Takes what is found here: one autocast region around an optimizer step.
        step_of: Gives the number of the step an optimizer (None: the first) is working on.
        guard: Catches faults of the check.
    """

    def __init__(
        self, usage: UsageWatch, report: ReportMistake, step_of: Callable[[Optimizer | None], int], guard: Guard
    ) -> None:
        self.guard = guard
        self._usage = usage
        self._report = report
        self._step_of = step_of
        self._stepped_in_epoch = -1  # autocast region in which the last optimizer step ran
        self._began_in_epoch = -1  # in which the step in progress began
        self._has_scaler = False  # a scaler has scaled a loss of this run

    def step_began(self, start: StepStart) -> None:
        """Checks that the step before ended outside of autocast: weights cast before it would be used after it."""
        now = start.ambient
        if now.cache and now.autocast_dtype is not None and self._stepped_in_epoch == process_hooks.epoch[0]:
            step = max(self._step_of(None) - 1, 0)
            self._report(Mistake(Cause.MISUSE_AUTOCAST_SPANS_STEP, user_place(), step))
        self._began_in_epoch = process_hooks.epoch[0]
        self._usage.new_iteration()

    def backward_began(self, backward: BackwardCall) -> None:
        """Checks where backward runs and what it starts from."""
        under = backward.ambient.autocast_dtype is not None
        several, seeds = backward.several_optimizers, backward_seeds(backward.args, backward.kwargs)
        self._usage.before_backward(backward.roots, seeds, under_autocast=under, several=several)

    def backward_ended(self) -> None:
        """Checks what was added to the gradients."""
        self._usage.after_backward()

    def scaler_joined(self, joined: JoinedScaler) -> None:
        """Takes down whether the scaler is a new one."""
        self._usage.new_scaler(joined.number, fresh=torch_private.scaler_is_fresh(joined.scaler))

    def scaler_call_began(self, call: ScalerCall) -> None:
        """Checks what must not come now."""
        if call.method is ScalerMethod.SCALE:
            self._has_scaler = True
        elif call.method in (ScalerMethod.UNSCALE, ScalerMethod.STEP) and _has_scaled_nothing(call.scaler):
            self._usage.nothing_scaled(call.argument)
        elif call.method is ScalerMethod.UNSCALE:
            self._usage.before_unscale(call.number, call.argument, call.place, by_loop=call.by_loop)
        elif call.method is ScalerMethod.STEP:
            on_device = torch_private.steps_on_device(call.argument)
            self._usage.before_step(call.number, call.argument, call.place, on_device=on_device)
        elif call.method is ScalerMethod.UPDATE:
            self._usage.before_update(call.number, by_hand=call.argument is not None)

    def scaler_call_ended(self, call: ScalerCall) -> None:
        """Takes down what has changed."""
        if call.method is ScalerMethod.SCALE:
            scale = torch_private.scaler_tensors(call.scaler)[0]
            self._usage.scaled_by(call.number, list(tensor_tree.tensors(call.argument)), call.result, scale)
        elif call.method is ScalerMethod.GET_SCALE:
            self._usage.scale_read(call.result)
        elif call.method is ScalerMethod.UNSCALE:
            self._usage.after_unscale(call.number, call.argument, call.place, by_loop=call.by_loop)
        elif call.method is ScalerMethod.STEP:
            self._usage.after_step(call.number, call.argument)
        elif call.method is ScalerMethod.UPDATE:
            self._usage.updated(call.number, call.place)
        elif call.method is ScalerMethod.LOAD_STATE_DICT:
            self._usage.restored(call.number)

    def bare_step(self, bare: BareStep) -> None:
        """Checks an optimizer that steps without the scaler."""
        if bare.late:
            self._usage.bypassed_late(bare.optimizer)
        else:
            self._usage.bypassed(bare.optimizer, half_forward=bare.half_forward, has_scaler=self._has_scaler)

    def step_ended(self, ended: EndedStep) -> None:
        """Takes down that the optimizer has stepped or was skipped, and under which autocast region."""
        attempt = ended.attempt
        self._usage.stepped(attempt.optimizer, skipped=attempt.scaling is not None and not attempt.stepped)
        epoch = process_hooks.epoch[0]
        within = ended.ambient.autocast_dtype is not None and (not attempt.late or self._began_in_epoch == epoch)
        self._stepped_in_epoch = epoch if within else -1

    def scheduler_stepped(self, scheduler: Any) -> None:
        """Checks that the step before was not skipped."""
        self._usage.scheduled(scheduler)


def _has_scaled_nothing(scaler: Any) -> bool:
    """Whether a ``GradScaler`` has scaled no loss: it refuses to unscale and to step then."""
    scale = torch_private.scaler_tensors(scaler)[0]
    return scale is None and isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled()
