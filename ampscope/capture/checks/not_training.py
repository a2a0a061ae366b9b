"""Notices a training that does not train: no gradient reaches an optimizer, no weight of it moves, or none is cleared.

Nothing is asked of an optimizer any more once it was seen to train, which most are at their first step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ampscope.capture.events import BackwardCall, EndedStep, RunEnd, StepAttempt, StepObserver, StepStart
from ampscope.capture.loop_state.held_state import largest
from ampscope.capture.loop_state.state_watch import MOST_NAMED, is_due
from ampscope.capture.step import gradients
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView, stand_in
from ampscope.capture.torch_support.process_group import left_apart
from ampscope.capture.torch_support.readback import Readback, Values
from ampscope.capture.torch_support.sharding import local
from ampscope.capture.torch_support.tensor_tree import HALF
from ampscope.capture.torch_support.torch_private import version_counter
from ampscope.capture.torch_support.user_line import Place, user_place
from ampscope.capture.tracing.light_statistics import checksum
from ampscope.capture.usage.mistake import Mistake, ReportMistake
from ampscope.trace.evidence import FindingEvidence
from ampscope.trace.schema import StepRow
from ampscope.trace.vocabulary import Cause, MistakeForm

#: Steps in a row after which it is told, at the run's end or before; in between, gradients are compared by value.
_ENOUGH_KEPT, _LONG_KEPT, _COMPARED = 8, 32, 6


@dataclass(slots=True)
class _Kept:
    """One gradient of an optimizer, as it was when the loop was last entitled to change it."""

    gradient: weakref.ref[Tensor]
    parameter: weakref.ref[Tensor]
    name: str
    first: int  #: the step that began with it
    place: Place | None
    version: int
    grew: bool = False  #: a backward has added to it since the step before
    steps: int = 0  #: made with it, without a line in between that changed it
    norm: Tensor | None = None  #: as the step that is compared left it
    stays: Tensor | None = None  #: whether it had the same values at the next backward, and others than zero

    def now(self) -> Tensor | None:
        """The gradient, where it is still the parameter's."""
        parameter, gradient = self.parameter(), self.gradient()
        return gradient if parameter is not None and parameter.grad is gradient else None


@dataclass(slots=True)
class _Skipped:
    """The gradients of a step that the scaler skipped, until somebody changes one of them."""

    step: int
    place: Place | None
    held: list[tuple[weakref.ref[Tensor], weakref.ref[Tensor], int]]  #: each with its parameter, and its version
    bad: Tensor | None = None  #: whether any was not finite still when the next backward began

    def now(self) -> list[Tensor]:
        """The gradients; none where one of them is no longer its parameter's, or has been changed."""
        there = []
        for gradient, parameter, version in self.held:
            value, owner = gradient(), parameter()
            if value is None or owner is None or owner.grad is not value or version_counter(value) != version:
                return []
            there.append(value)
        return there

    def renew(self) -> None:
        """Takes down what a backward has added to."""
        self.held = [(each, of, version_counter(now)) for each, of, _ in self.held if (now := each()) is not None]


class KeptGradients:
    """Follows a gradient of each optimizer from step to step, until somebody clears it; and all of a skipped step."""

    def __init__(self, models: Models, readback: Readback, report: ReportMistake) -> None:
        self._models = models
        self._readback = readback
        self._report = report
        self._followed: dict[int, _Kept] = {}  # by number of the optimizer
        self._cleared: set[int] = set()  # numbers of those that were cleared once, or told
        self._skipped: dict[int, _Skipped] = {}  # by number of the optimizer
        self._told_skipped: set[int] = set()

    def backward_began(self) -> None:
        """Lets go of those that the loop has changed since the backward, or the step, before."""
        for number, skipped in list(self._skipped.items()):
            gradients = skipped.now()
            if not gradients:
                del self._skipped[number]
            elif skipped.bad is None:
                skipped.bad = ~torch.stack(largest(gradients)).isfinite().all()
        for number, kept in list(self._followed.items()):
            gradient = kept.now()
            if gradient is None or version_counter(gradient) != kept.version:
                self._let_go(number)
            elif kept.norm is not None and kept.stays is None:  # ``grad.data.zero_()`` leaves the counter as it is
                norm = torch.linalg.vector_norm(gradient)
                kept.stays = (norm == kept.norm) & (norm > 0)

    def backward_ended(self) -> None:
        """Takes down what it has added to."""
        for skipped in self._skipped.values():
            skipped.renew()
        for kept in self._followed.values():
            gradient = kept.now()
            if gradient is not None and version_counter(gradient) != kept.version:
                kept.grew, kept.version = True, version_counter(gradient)

    def step_ended(self, attempt: StepAttempt) -> None:
        """Counts a step made with what was never cleared."""
        self._look_at_skipped(attempt)
        if attempt.index in self._cleared or not isinstance(attempt.optimizer, Optimizer):
            return
        kept = self._followed.get(attempt.index)
        if not attempt.stepped or attempt.bad or (kept is not None and kept.now() is None):
            self._followed.pop(attempt.index, None)  # whoever skips a step need not clear what it was skipped for
        elif kept is None:
            self._follow(attempt)
        elif kept.grew and (gradient := kept.now()) is not None:
            kept.grew, kept.version, kept.steps = False, version_counter(gradient), kept.steps + 1
            if kept.steps == _COMPARED:
                kept.norm = torch.linalg.vector_norm(gradient.detach())
            if kept.steps == _LONG_KEPT:
                self._tell(attempt.index, kept)

    def _look_at_skipped(self, attempt: StepAttempt) -> None:
        """Follows what a skipped step leaves, and tells where the next one is skipped with it."""
        before, is_skip = self._skipped.pop(attempt.index, None), attempt.scaling is not None and not attempt.stepped
        if not is_skip or attempt.index in self._told_skipped or not isinstance(attempt.optimizer, Optimizer):
            return
        if before is not None and before.bad is not None:
            self._readback.fetch({"bad": before.bad}, lambda known: self._was_kept(attempt.index, before, known))
        ours = [
            (weakref.ref(gradient), weakref.ref(parameter), version_counter(gradient))
            for parameter, gradient in OptimizerView(attempt.optimizer).with_gradients
            if type(gradient) is Tensor and gradient.layout is torch.strided
        ]
        self._skipped[attempt.index] = _Skipped(attempt.step, user_place(), ours)

    def _was_kept(self, number: int, skipped: _Skipped, known: Values) -> None:
        if known["bad"] and number not in self._told_skipped:
            self._told_skipped.add(number)
            self._skipped.pop(number, None)
            self._report(Mistake(Cause.MISUSE_GRADIENTS_KEPT, skipped.place, skipped.step))

    def _follow(self, attempt: StepAttempt) -> None:
        if OptimizerView(attempt.optimizer).has_own_step:  # some are made for sums
            self._cleared.add(attempt.index)
            return
        for parameter, gradient in OptimizerView(attempt.optimizer).with_gradients:
            known = self._models.parameters.get(id(parameter))
            if known is not None and type(gradient) is Tensor and gradient.layout is torch.strided:
                both, version = (weakref.ref(gradient), weakref.ref(parameter)), version_counter(gradient)
                self._followed[attempt.index] = _Kept(*both, known[0], attempt.step, user_place(), version)
                return

    def run_ended(self) -> None:
        """Tells of what was not cleared to the end."""
        for number, kept in list(self._followed.items()):
            if kept.steps >= _ENOUGH_KEPT:
                self._tell(number, kept)

    def _tell(self, number: int, kept: _Kept) -> None:
        self._let_go(number)
        self._readback.fetch({"stays": kept.stays}, lambda known: self._came(kept, known))

    def _came(self, kept: _Kept, known: Values) -> None:
        if known["stays"]:
            found = FindingEvidence(attempts=kept.steps, parameters=(kept.name,), count=1)
            self._report(Mistake(Cause.GRADIENTS_NOT_CLEARED, kept.place, kept.first, evidence=found))

    def _let_go(self, number: int) -> None:
        del self._followed[number]
        self._cleared.add(number)


#: Attempts after which what has not trained is told; and where there may be a good reason for it.
_ENOUGH, _LONG = 8, 64
#: Attempts at a learning rate of zero after which a run that ends has trained nothing: a warm-up begins with one.
_RESTING = 32


@dataclass(slots=True)
class _Account:
    """The record of one optimizer since its first step; it keeps neither that nor its parameters alive."""

    has_own_step: bool
    place: Place | None
    first: int  #: its first step that was seen
    held: Sequence[weakref.ref[Tensor]] = ()  #: its parameters
    attempts: int = 0  #: at a learning rate above zero, and not skipped
    resting: int = 0  #: at a learning rate of zero
    learns: bool = False  #: it had a gradient that is not zero, as far as was recorded
    has_gradient: bool = False  #: it had any, when it was looked at
    reached: bool = False  #: a backward left it one that is not zero
    given: bool = False  #: it had one that is not zero as it stepped
    moves: bool = False  #: a weight of it is another than at some look before
    has_loss: bool = False  #: some loss was not exactly zero
    sums: Sequence[Tensor | None] = ()  #: of its weights, at the latest look

    @property
    def parameters(self) -> list[Tensor]:
        """Its parameters that are still there."""
        return [each for reference in self.held if (each := reference()) is not None]

    def compare(self) -> Tensor | None:
        """Whether weights are others than at the look before, as a device scalar; None at the first look."""
        before, self.sums = self.sums, [checksum(local(each)) for each in self.parameters]
        sums = self.sums
        both = zip(before, sums, strict=False)
        moved = [one != other for one, other in both if one is not None and other is not None]
        if before and not len(moved) == len(before) == len(sums):
            self.moves = True  # other weights, or such that cannot be looked at: nothing is known
        home = moved[0].device if moved else None
        return torch.stack([each.to(home, non_blocking=True) for each in moved]).any() if moved else None

    def form(self, *, at_end: bool) -> MistakeForm | None:
        """Why it does not train; None where that is not known, or not yet."""
        if self.attempts < _ENOUGH:
            rests = at_end and not (self.attempts or self.moves) and self.resting >= _RESTING
            return MistakeForm.NO_LEARNING_RATE if rests else None
        if not self.learns:
            return self._without_gradient(at_end=at_end)
        if not (self.given or self.moves):
            return MistakeForm.GRADIENTS_ZEROED
        in_half = any(parameter.dtype in HALF for parameter in self.parameters)  # `StillUpdates` looks closer
        rounds = at_end and not (self.moves or in_half or self.has_own_step)
        return MistakeForm.ROUNDED_AWAY if rounds else None

    def _without_gradient(self, *, at_end: bool) -> MistakeForm | None:
        if not any(parameter.requires_grad for parameter in self.parameters):
            return MistakeForm.ALL_FROZEN
        if not self.has_gradient:
            return MistakeForm.GRADIENTS_ZEROED if self.reached else MistakeForm.NO_GRADIENT
        if self.reached:
            return MistakeForm.GRADIENTS_ZEROED if self.has_loss else None
        is_long = at_end or self.attempts >= _LONG  # advantages may be all zero for a while
        return MistakeForm.ZERO_GRADIENTS if is_long and self.has_loss else None


class Liveness(StepObserver):
    """Follows each optimizer until it trains."""

    def __init__(self, models: Models, readback: Readback, report: ReportMistake, guard: Guard) -> None:
        self.guard = guard
        self._models = models
        self._readback = readback
        self._report = report
        self._accounts: dict[int, _Account] = {}  # by number of the optimizer; none is kept once one of them trains
        self._trains = False
        self._kept = KeptGradients(models, readback, report)
        self._looks = False
        self._revision = -1  # of the models, when it was asked what reduces their gradients
        self._left: dict[int, Tensor | None] = {}  # norms as a backward left them
        self._strangers = 0  # steps of optimizers without a gradient that hold no watched parameter

    def step_began(self, start: StepStart) -> None:
        """Takes down whether this step is one that is looked at."""
        self._looks = not self._trains and is_due(start.number)

    def backward_began(self, _: BackwardCall) -> None:
        """Looks whether gradients were cleared before it."""
        self._kept.backward_began()

    def backward_ended(self) -> None:
        """Measures what it has left, for the loop may take it away before the optimizer steps."""
        self._kept.backward_ended()
        if self._looks:
            self._left = {
                number: gradients.total_norm(stand_in(each.parameters)) for number, each in self._accounts.items()
            }

    def optimizer_steps(self, attempt: StepAttempt) -> None:
        """Looks at the weights before they move, if the turn has come."""
        if attempt.step and self._revision != self._models.revision:
            self._revision = self._models.revision
            self._ask_ranks()
        if self._trains or not isinstance(attempt.optimizer, Optimizer):
            return
        account, view = self._accounts.get(attempt.index), OptimizerView(attempt.optimizer)
        if account is None:
            account = self._accounts[attempt.index] = _Account(view.has_own_step, user_place(), attempt.step)
        if is_due(attempt.step - account.first):
            account.held = list(map(weakref.ref, view.parameters))
            norm = gradients.total_norm(attempt.optimizer)
            account.has_gradient |= norm is not None
            self._look(account, norm, self._left.pop(attempt.index, None))

    def _look(self, account: _Account, norm: Tensor | None = None, left: Tensor | None = None) -> None:
        values = {"norm": norm, "left": left, "moved": account.compare()}
        self._readback.fetch({**values}, lambda known: self._came(account, known))

    def _came(self, account: _Account, known: Values) -> None:
        account.moves |= bool(known["moved"])
        account.given |= bool(known["norm"])
        account.reached |= bool(known["left"])
        account.learns |= bool(known["norm"])
        self._settle(account)

    def _settle(self, account: _Account) -> None:
        if account.learns and account.moves:
            self._trains = True
            self._accounts.clear()

    def step_ended(self, ended: EndedStep) -> None:
        """Looks at the weights again where the optimizer has just stepped; a loop may put them back before its next."""
        self._kept.step_ended(ended.attempt)
        account = self._accounts.get(ended.attempt.index)
        if account is not None and ended.attempt.stepped and is_due(ended.attempt.step - account.first):
            self._look(account)

    def arrived(self, attempt: StepAttempt, row: StepRow) -> None:
        """The numbers of a step have reached the host."""
        account = self._accounts.get(attempt.index)
        if account is None or row.skipped or self.guard.broken:
            return
        with self.guard:
            rests = row.lr == 0 and row.lrs is None
            account.resting, account.attempts = account.resting + rests, account.attempts + (not rests)
            account.learns |= bool(row.grad_norm if row.clipped_grad_norm is None else row.clipped_grad_norm)
            account.has_loss |= row.loss != 0
            self._settle(account)
            if not rests and account.attempts in (_ENOUGH, _LONG):
                self._look_and_judge(at_end=False)

    def foreign_step(self, optimizer: Optimizer) -> None:
        """An optimizer steps that holds no watched parameter, in a step of the watched model."""
        if self._trains or self._accounts or self._strangers >= _ENOUGH or OptimizerView(optimizer).gradients:
            return
        held = [name for name, each in self._models.parameters.values() if each.grad is not None]
        self._strangers = self._strangers + 1 if held else 0
        if self._strangers == _ENOUGH:
            found = replace(_named(held), attempts=_ENOUGH)
            self._report(Mistake(Cause.NOTHING_TRAINS, user_place(), 0, MistakeForm.OTHER_PARAMETERS, found))

    def run_ended(self, _: RunEnd) -> None:
        """Tells what has not trained to the end."""
        self._kept.run_ended()
        self._look_and_judge(at_end=True)
        self._readback.drain()
        self._accounts.clear()

    def _look_and_judge(self, *, at_end: bool) -> None:
        for account in list(self._accounts.values()):
            self._look(account)
        self._readback.fetch({}, lambda _: self._judge(at_end=at_end))

    def _judge(self, *, at_end: bool) -> None:
        """Tells of it where no optimizer trains; of several, one may rest on purpose."""
        forms = [(account, account.form(at_end=at_end)) for account in self._accounts.values()]
        if not forms or any(form is None for _, form in forms):
            return
        account, form = forms[0]
        known = self._models.parameters
        named = _named(known[id(each)][0] for each in account.parameters if id(each) in known)
        found = replace(named, attempts=account.attempts or account.resting, learns=account.learns)
        self._trains = True  # nothing more is to be told
        self._accounts.clear()
        self._report(Mistake(Cause.NOTHING_TRAINS, account.place, account.first, form, found))

    def _ask_ranks(self) -> None:
        """Tells of parameters whose gradients no other rank gets, though the model is wrapped for that."""
        apart = left_apart(self._models.roots)
        if apart is not None:
            names, ranks = apart
            found = replace(_named(names), ranks=ranks)
            self._report(Mistake(Cause.RANKS_NOT_REDUCED, user_place(), evidence=found))


def _named(names: Iterable[str]) -> FindingEvidence:
    """Parameters for the evidence: the first, and how many there are."""
    held = list(names)
    return FindingEvidence(parameters=tuple(held[:MOST_NAMED]), count=len(held))
