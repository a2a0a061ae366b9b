"""`UsageWatch` notices mistakes in how scaler and autocast are used, by the order of events and version counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ampscope.capture.events import (
    BackwardCall,
    BareStep,
    EndedStep,
    JoinedScaler,
    ScalerCall,
    ScalerMethod,
    StepObserver,
    StepStart,
    WeightsCast,
)
from ampscope.capture.hooks import process_hooks
from ampscope.capture.torch_support import tensor_tree, torch_private
from ampscope.capture.torch_support.backward_call import backward_seeds
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.torch_support.user_line import Place, user_place
from ampscope.capture.usage.call_order import CallOrder, ScalerHandovers, SchedulerSteps
from ampscope.capture.usage.followed_values import FollowedValues, HandScale
from ampscope.capture.usage.gradient_edits import GradientEdits
from ampscope.capture.usage.gradient_scales import UNSCALED, GradientScales, HalfGradients, PartlyUnscaled, ScaledLosses
from ampscope.capture.usage.mistake import Mistake, ReportMistake, holds_autocast
from ampscope.capture.usage.scale_dependence import CONSTANT, OF_SCALE, ScaleDependence
from ampscope.trace.vocabulary import Cause, MistakeForm


class UsageWatch(StepObserver):
    """Follows one run's loop: as an observer of its steps, and as a listener to the functions that it calls.

    Args:
        models: The watched models.
        report: Called with each mistake.
        step_of: Gives the number of the step an optimizer (None: the first) is working on.
        guard: Catches faults of the check.
    """

    def __init__(
        self, models: Models, report: ReportMistake, step_of: Callable[[Optimizer | None], int], guard: Guard
    ) -> None:
        self.guard = guard
        self._write = report
        self._step_of = step_of
        self._losses = ScaledLosses(models)
        self._scales = GradientScales(models)
        self._values = FollowedValues(
            lambda: (p.grad for _, p in models.parameters.values() if p.grad is not None),
        )
        self._edits = GradientEdits(self._values, lambda: step_of(None))
        self._by_hand = HandScale(self._values)
        self._calls = CallOrder()
        self._half = HalfGradients()
        self._handovers = ScalerHandovers()
        self._schedulers = SchedulerSteps()
        self._partly = PartlyUnscaled(self._scales, self._values, several=False)
        self._scaled = False  # gradients hold a scale, a scaler's or one of the loop's own
        self._moved_unscaled = False  # the loop itself moves weights, by what does not depend on a scaler's scale
        self._latest_step = 0  # that was attempted
        self._has_scaler = False  # the run has got one
        self._has_scaled = False  # a scaler has scaled a loss of this run
        self._stepped_in_epoch = -1  # autocast region in which the last optimizer step ran
        self._began_in_epoch = -1  # in which the step in progress began
        self._is_known = True  # it is what it was in a step that was heard
        self._is_heard = True  # the loop's own work on gradients
        self._unscales_by_hand = False  # as far as it was heard

    def _report(self, mistake: Mistake | None, step: int | None = None) -> None:
        """Writes down a mistake of a step; None for the present one."""
        if mistake is not None:
            at = step if mistake.step is None else mistake.step
            self._write(mistake._replace(step=at))

    # -- what happens in a step -------------------------------------------------------------------------------

    def step_began(self, start: StepStart) -> None:
        """Checks that the step before ended outside of autocast: weights cast before it would be used after it."""
        now = start.ambient
        if now.cache and now.autocast_dtype is not None and self._stepped_in_epoch == process_hooks.epoch[0]:
            step = max(self._step_of(None) - 1, 0)
            self._report(Mistake(Cause.MISUSE_AUTOCAST_SPANS_STEP, user_place(), step))
        self._began_in_epoch = process_hooks.epoch[0]
        self.new_iteration()

    def backward_began(self, backward: BackwardCall) -> None:
        """Checks where backward runs and what it starts from."""
        under = backward.ambient.autocast_dtype is not None
        several, seeds = backward.several_optimizers, backward_seeds(backward.args, backward.kwargs)
        self.before_backward(backward.roots, seeds, under_autocast=under, several=several)

    def backward_ended(self) -> None:
        """Checks what was added to the gradients."""
        self.after_backward()

    def scaler_joined(self, joined: JoinedScaler) -> None:
        """Takes down whether the scaler is a new one."""
        self.new_scaler(joined.number, fresh=torch_private.scaler_is_fresh(joined.scaler))

    def scaler_call_began(self, call: ScalerCall) -> None:
        """Checks what must not come now."""
        if call.method is ScalerMethod.SCALE:
            self._has_scaled = True
        elif call.method in (ScalerMethod.UNSCALE, ScalerMethod.STEP) and _has_scaled_nothing(call.scaler):
            self.nothing_scaled(call.argument)
        elif call.method is ScalerMethod.UNSCALE:
            self.before_unscale(call.number, call.argument, call.place, by_loop=call.by_loop)
        elif call.method is ScalerMethod.STEP:
            on_device = torch_private.steps_on_device(call.argument)
            self.before_step(call.number, call.argument, call.place, on_device=on_device)
        elif call.method is ScalerMethod.UPDATE:
            self.before_update(call.number, by_hand=call.argument is not None)

    def scaler_call_ended(self, call: ScalerCall) -> None:
        """Takes down what has changed."""
        if call.method is ScalerMethod.SCALE:
            scale = torch_private.scaler_tensors(call.scaler)[0]
            self.scaled_by(call.number, list(tensor_tree.tensors(call.argument)), call.result, scale)
        elif call.method is ScalerMethod.GET_SCALE:
            self.scale_read(call.result)
        elif call.method is ScalerMethod.UNSCALE:
            self.after_unscale(call.number, call.argument, call.place, by_loop=call.by_loop)
        elif call.method is ScalerMethod.STEP:
            self.after_step(call.number, call.argument)
        elif call.method is ScalerMethod.UPDATE:
            self.updated(call.number, call.place)
        elif call.method is ScalerMethod.LOAD_STATE_DICT:
            self.restored(call.number)

    def scaler_call_lost(self, call: ScalerCall) -> None:
        """Checks whether it refuses gradients that have become float16."""
        if call.method in (ScalerMethod.UNSCALE, ScalerMethod.STEP):
            self._report(self._half.check(call.argument, refused=True), self._step_of(call.argument))

    def bare_step(self, bare: BareStep) -> None:
        """Checks an optimizer that steps without the scaler."""
        if bare.late:
            self.bypassed_late(bare.optimizer)
        else:
            self.bypassed(bare.optimizer, half_forward=bare.half_forward, has_scaler=self._has_scaled)

    def step_ended(self, ended: EndedStep) -> None:
        """Takes down that the optimizer has stepped or was skipped, and under which autocast region."""
        attempt = ended.attempt
        self._report(self._half.rounded())
        self.stepped(attempt.optimizer, skipped=attempt.scaling is not None and not attempt.stepped)
        epoch = process_hooks.epoch[0]
        within = ended.ambient.autocast_dtype is not None and (not attempt.late or self._began_in_epoch == epoch)
        self._stepped_in_epoch = epoch if within else -1

    def weights_cast(self, cast: WeightsCast) -> None:
        """Takes down what the loop makes of the weights between two steps."""
        self._half.cast(cast)

    def scheduler_stepped(self, scheduler: Any) -> None:
        """Checks that the step before was not skipped."""
        self.scheduled(scheduler)

    # -- forward and backward -----------------------------------------------------------------------------------

    def new_iteration(self) -> None:
        """A watched forward begins after a step."""
        self._losses.clear()
        self._edits.new_iteration()
        self._scaled, self._is_heard, self._is_known = False, True, True

    def before_backward(self, roots: list[Tensor], seeds: list[Tensor], *, under_autocast: bool, several: bool) -> None:
        """A backward begins.

        Args:
            roots: What it starts from.
            seeds: The gradients of its roots, where the loop gives them: they may hold the scale.
            under_autocast: Whether an autocast region is open.
            several: Whether to tell apart which parameters it reaches: there may be optimizers without a scaler.
        """
        if under_autocast and not holds_autocast():
            self._report(Mistake(Cause.MISUSE_BACKWARD_UNDER_AUTOCAST, user_place()))
        self._moved_unscaled = False
        self._partly = PartlyUnscaled(self._scales, self._values, several=several)
        known, scalers = self._calls.scalers, self._losses.scalers_of(roots)
        by_hand = scalers == UNSCALED and self._scaled_by_hand(roots, seeds)
        if by_hand and known:
            scalers = known if len(known) == 1 else frozenset()
        self._by_hand.in_gradients |= by_hand
        self._scaled = self._scaled or by_hand or scalers != UNSCALED
        unscaled = self._reached_unscaled(roots) if scalers != UNSCALED and not seeds else None
        self._scales.before_backward(scalers, several=several or len(known) > 1, unscaled=unscaled)
        self._calls.backward_began()

    def _reached_unscaled(self, roots: list[Tensor]) -> int | None:
        """A parameter that a backward reaches from scaled losses and from one that is not, added up or beside them."""
        found = zip(roots, map(self._values.dependence_of, roots), strict=True)
        unlike = [root for root, how in found if how.inhomogeneous or (how == CONSTANT and len(roots) > 1)]
        return self._losses.reached_unscaled(unlike) if unlike else None

    def _scaled_by_hand(self, roots: list[Tensor], seeds: list[Tensor]) -> bool:
        """Whether gradients are asked of losses that the loop has multiplied with a scale, before or by their seeds."""
        if not self._calls.has_scaler:
            self._by_hand.seeded(seeds)
        return any(self._values.dependence_of(each).degree == 1 for each in (*roots, *seeds))

    def after_backward(self) -> None:
        """A backward has added to the gradients."""
        if self._scales.after_backward() and self._scaled:
            self._report(Mistake(Cause.MISUSE_UPDATE_EACH_MICROBATCH, self._calls.gradients_used_at))
        self._values.backward_done()

    def saw_function(
        self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any, *, after_backward: bool
    ) -> None:
        """A torch function ran outside the models."""
        if func is torch.autograd.grad:
            seeds = tensor_tree.tensors(kwargs.get("grad_outputs", args[2] if len(args) > 2 else None))
            roots = list(tensor_tree.tensors(args[0]))
            by_hand = self._scaled_by_hand(roots, list(seeds))
            if self._losses.scalers_of(roots) != UNSCALED or by_hand:
                self._edits.scaled_anew(result)
            self._by_hand.in_gradients |= by_hand
            return
        if getattr(func, "__name__", "") == "backward":
            return  # is told by itself; the gradients that it has left are found when the loop touches them
        if after_backward:
            self._scales.function_ran(func, args)
            if self._scaled and self._is_heard:
                self._values.find_gradients()
        if not self._has_scaler:
            self._by_hand.function_runs(func, args, kwargs, after_backward=after_backward)
        if self._values.may_depend((*args, *kwargs.values()) if kwargs else args):
            self._edits.function_ran(func, args, kwargs, result)

    def scaled(self, loss: Tensor, scale: Tensor, result: Tensor) -> None:
        """A scaler has multiplied a loss by its scale; one that is made of gradients depends on it already."""
        if self._values.dependence_of(loss) != CONSTANT:
            self._edits.function_ran(torch.mul, (loss, scale), {}, result)

    def is_unheard(self, *, known: bool = True) -> None:
        """The calls that change gradients are not told now: they are those of before, if ``known``."""
        self._is_heard, self._is_known = False, known
        self._values.missed = True

    @property
    def scales_by_hand(self) -> bool:
        """Whether the loop multiplies its losses by a scale of its own, so that gradients hold one."""
        return self._by_hand.in_gradients

    def edited(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """A torch function ran between the unscaling of gradients and the scaler's update."""
        partly = self._partly.is_so()
        if (partly or (self._scaled and self._values.holds_scaled)) and self._values.may_depend(
            (*args, *kwargs.values())
        ):
            self._edits.function_ran(func, args, kwargs, result, unscaled=not partly)

    def weights_move(self, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """The loop is about to move weights with a torch function; the step may end with it."""
        if not self._calls.has_scaler:
            if self._scaled:
                self._values.find_gradients()
            self._by_hand.function_runs(func, args, kwargs, after_backward=True)
        elif self._scaled:
            self._values.find_gradients()
            self._moved_unscaled = self._by_hand.is_free_of_scale(func, args, kwargs)

    def transformed(self, factors: Iterable[Any], result: Any) -> None:
        """A transform of ``torch.func`` returned ``result``, and multiplied single values with ``factors`` for it."""
        if not self._calls.has_scaler and self._by_hand.transformed(factors):
            self._edits.scaled_anew(result)

    # -- the scaler ---------------------------------------------------------------------------------------------

    def new_scaler(self, scaler: int, *, fresh: bool) -> None:
        """The run has got a scaler with this number; ``fresh`` when it has scaled nothing and loaded no state yet."""
        if not self._calls.has_scaler:
            self._values.start_over()  # numbers that only looked like a scale
        self._has_scaler = True
        self._calls.new_scaler(scaler)
        self._handovers.new_scaler(scaler, fresh=fresh)

    def scaled_by(self, scaler: int, inputs: list[Tensor], outputs: Any, scale: Tensor | None) -> None:
        """A scaler has scaled losses.

        Args:
            scaler: Its number.
            inputs: The losses.
            outputs: What it returned.
            scale: The tensor it keeps its scale in.
        """
        dependences = list(map(self._values.dependence_of, inputs))
        if any(map(CONSTANT.__ne__, dependences)):
            grown = [loss for loss, how in zip(inputs, dependences, strict=True) if how.degree > 0]
            if self._losses.has_scaled(scaler, grown):
                mistake = Mistake.here(Cause.MISUSE_MULTIPLE_SCALERS_UPDATE, MistakeForm.SCALED_TWICE)
                self._report(mistake, self._step_of(None))
            elif any(map(_depends, dependences)):
                mistake = Mistake.here(Cause.MISUSE_NO_UNSCALE, MistakeForm.LOSS_OF_SCALED_GRADIENTS)
                self._report(self._edits.of_kept(mistake, inputs), self._step_of(None))
        results = list(tensor_tree.tensors(outputs))
        self._losses.scaled(scaler, results)
        self._values.scale_tensor(scale)
        for loss in results:
            if self._values.dependence_of(loss) == CONSTANT:
                self._values.follow(loss, OF_SCALE)
        self._handovers.scaled_by(scaler, scale)

    def scale_read(self, scale: float) -> None:
        """The loop asked a scaler for its scale."""
        self._values.scale_read(scale)

    def nothing_scaled(self, optimizer: Optimizer) -> None:
        """``unscale_`` or ``step`` is called of a scaler that has scaled no loss; torch refuses it."""
        mistake = Mistake.here(Cause.MISUSE_MISSING_SCALER, MistakeForm.NOTHING_SCALED)
        self._report(mistake, self._step_of(optimizer))

    def before_unscale(self, scaler: int, optimizer: Optimizer, place: Place | None, *, by_loop: bool) -> None:
        """``unscale_`` is about to divide the gradients (called by the loop, or by ``step``, at ``place``)."""
        parameters = OptimizerView(optimizer).parameters
        unscaled = self._scales.is_unscaled(parameters)
        mistakes = (
            self._edits.take() or self._unscaled_by_hand(parameters),
            self._calls.unscale_begins(scaler, optimizer) if by_loop else None,
            self._calls.wrong_scale(scaler, optimizer, self._scales.scalers_of(parameters), unscaled=unscaled),
            self._half.check(optimizer),
        )
        for mistake in mistakes:
            if mistake is not None:
                self._report(mistake, self._step_of(optimizer))
        handover = self._handovers.unscales(scaler, optimizer, parameters, self._step_of(None), place)
        if handover is not None:
            self._report(Mistake(handover.cause, handover.place, handover.step, evidence=handover.evidence))

    def _unscaled_by_hand(self, parameters: list[Tensor]) -> Mistake | None:
        """``unscale_`` follows a division by the loop itself."""
        if not self._values.any_unscaled(parameters) or self._scales.is_unscaled(parameters):
            return None
        return Mistake.at(self._edits.unscaled_at, Cause.MISUSE_NO_UNSCALE, MistakeForm.UNSCALED_BY_HAND)

    def after_unscale(self, scaler: int, optimizer: Optimizer, place: Place | None, *, by_loop: bool) -> None:
        """The gradients are unscaled now, by a call at ``place``."""
        self._calls.unscaled(scaler, optimizer, place)
        self._scales.were_unscaled(OptimizerView(optimizer).parameters, by_loop=by_loop)
        self._partly.unscaled(self._scaled)

    def before_step(self, scaler: int, optimizer: Optimizer, place: Place | None, *, on_device: bool) -> None:
        """``scaler.step`` begins; torch refuses a second one before ``update``, and one without gradients.

        Args:
            scaler: The scaler's number.
            optimizer: The optimizer.
            place: From which line.
            on_device: Whether the optimizer unscales by itself, without ``unscale_``.
        """
        if not self._edits.are_judged:
            self._report(self._edits.rate_of(optimizer), self._step_of(optimizer))
            if self._calls.is_unscaled(scaler, optimizer):
                self._report(self._edits.take(), self._step_of(optimizer))
        mistake = self._calls.step_begins(scaler, optimizer) or self._scales.cleared(optimizer)
        if mistake is not None:
            self._report(mistake, self._step_of(optimizer))
        elif on_device and not self._calls.is_unscaled(scaler, optimizer):
            self.before_unscale(scaler, optimizer, place, by_loop=False)

    def after_step(self, scaler: int, optimizer: Optimizer) -> None:
        """``scaler.step`` is over."""
        self._calls.stepped(scaler, optimizer)

    def before_update(self, scaler: int, *, by_hand: bool) -> None:
        """``update`` begins; torch refuses one that follows no step."""
        if not by_hand:
            self._report(self._calls.update_begins(scaler, present=self._step_of(None), latest=self._latest_step))

    def updated(self, scaler: int, place: Place | None) -> None:
        """``update`` was called at ``place``."""
        self._calls.updated(scaler, place)

    def restored(self, scaler: int) -> None:
        """A scaler was given a saved state."""
        self._handovers.restored(scaler)

    # -- the optimizer ------------------------------------------------------------------------------------------

    def bypassed(self, optimizer: Optimizer, *, half_forward: bool, has_scaler: bool) -> None:
        """``optimizer.step`` was called without the scaler."""
        parameters = OptimizerView(optimizer).parameters
        self._by_hand.judged = True
        if not self._is_known:
            return
        if self._is_heard:
            self._unscales_by_hand = self._values.any_unscaled(parameters) or self._moved_unscaled
        if self._by_hand.divided_out or self._unscales_by_hand:
            return
        if self._scales.hold_scale(parameters):
            mistake = Mistake.here(Cause.MISUSE_NO_UNSCALE, MistakeForm.STEPPED_PAST_SCALER)
            self._report(mistake, self._step_of(optimizer))
        elif half_forward and not has_scaler and not _any_half(parameters):  # no scaler takes those
            mistake = Mistake.here(Cause.MISUSE_MISSING_SCALER, MistakeForm.NO_SCALER)
            self._report(mistake, self._step_of(optimizer))

    def bypassed_late(self, optimizer: Optimizer) -> None:
        """``optimizer.step`` was called without the scaler, after another optimizer has ended the step."""
        parameters = OptimizerView(optimizer).parameters
        if self._scales.hold_scale(parameters):
            mistake = Mistake.here(Cause.MISUSE_NO_UNSCALE, MistakeForm.STEPPED_PAST_SCALER)
            self._report(mistake, self._latest_step)
            self._scales.stepped(parameters)

    def stepped(self, optimizer: Optimizer, *, skipped: bool) -> None:
        """A step attempt of ``optimizer`` is over."""
        self._scales.stepped(OptimizerView(optimizer).parameters)
        self._latest_step = self._step_of(optimizer)
        self._schedulers.attempted(optimizer, self._latest_step, skipped=skipped)

    def scheduled(self, scheduler: Any) -> None:
        """A learning rate scheduler steps."""
        step = self._schedulers.stepped(scheduler)
        if step is not None:
            self._report(Mistake(Cause.MISUSE_SCHEDULER_ORDER, user_place(), step))


def _depends(dependence: ScaleDependence) -> bool:
    """Whether a loss would be another one with another scale; a factor of the loop's own may just equal the scale."""
    return dependence.inhomogeneous is not None or (dependence.degree != 0 and not dependence.of_scale)


def _any_half(parameters: list[Tensor]) -> bool:
    return any(parameter.dtype is torch.float16 for parameter in parameters)


def _has_scaled_nothing(scaler: Any) -> bool:
    """Whether a ``GradScaler`` has scaled no loss: it refuses to unscale and to step then."""
    scale = torch_private.scaler_tensors(scaler)[0]
    return scale is None and isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled()
