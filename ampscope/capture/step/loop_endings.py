"""Steps that no optimizer ends: the loop moves weights with its own hands, or gives the step up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from ampscope.capture.events import Doubt, OpenStep, Through, may_train
from ampscope.capture.step import gradients, verdict
from ampscope.capture.step.attempts import Attempts
from ampscope.capture.step.cycle import State
from ampscope.capture.tape import taped_step
from ampscope.capture.tape.weight_writes import WrittenValues
from ampscope.capture.torch_support import failed_call
from ampscope.capture.torch_support.torch_private import version_counter
from ampscope.capture.tracing import light_statistics

#: Evaluations of the run's first step after which the loop has moved weights by gradients itself, and goes on: by then
#: the optimizer of a loop that climbs within its step (SAM, once or twice) has stepped. Who has not is there for
#: another reason; who steps later has the weights from then on.
MOST_UNSTEPPED = 3


class _Moved(NamedTuple):
    """The loop has moved weights by their gradients, and an optimizer holds them that has never stepped."""

    opened: OpenStep
    losses: int  #: of the step, until then
    parcels: int
    micro_batches: int
    norm: Tensor | None
    bad: bool  #: the step had gone bad by then

    def since(self, before: _Moved | None) -> OpenStep:
        """Returns the part of the step that lies between an earlier move and this one."""
        losses, parcels, backwards = before[1:4] if before is not None else (0, 0, 0)
        return replace(
            self.opened,
            losses=self.opened.losses[losses : self.losses],
            parcels=self.opened.parcels[parcels : self.parcels],
            micro_batches=self.micro_batches - backwards,
        )


class LoopEndings:
    """Judges a step before the loop itself ends it.

    Args:
        attempts: Begins and ends the attempt that such a step is; its tape tells of each function that is about to
            move weights.
    """

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self._models = attempts.models
        self._optimizers = attempts.optimizers
        self._cycle = attempts.cycle
        self._tape = attempts.tape
        self._own = attempts.own
        self._guard = attempts.guard
        self._versions: int | None = None  # of the weights before a backward, where nobody is known to step them
        self._moved = False  # by an optimizer that stepped inside a backward
        self._unstepped: list[_Moved] = []  # in the present step
        self._tape.on_weights_move(self.before_weights_move)
        self._tape.on_gradients(self.gradients_given)

    def before_weights_move(self, weights: list[Tensor], values: WrittenValues) -> None:
        """The loop is about to write into ``weights``: what the step has come to is judged while they are there.

        In mid-step (SAM) the step goes on afterwards; where no optimizer holds the weights, their change ends it.

        Args:
            weights: What it writes.
            values: What it writes them with.
        """
        if not self._cycle.is_open or self._cycle.is_busy:
            return
        opened = self._cycle.opened
        with self._own, self._guard:
            if self._optimizers.nobody_steps(weights):
                taken_up = self._takes_up(values.operands)
                self._updated_by_hand(weights, values.operands if values.are_copied else (), taken_up=taken_up)
                return
            norm = None
            if opened.bad is None:
                attempt = self._attempts.expected(weights)
                self._attempts.check(attempt)
                self._attempts.found(attempt, verdict.of_what_gradients_hide(attempt, [], None))
                self._attempts.check_updates(attempt)
                opened.bad, norm = attempt if attempt.bad else None, attempt.norm
            if not len(self._optimizers):
                self._note_unstepped(values, norm)

    def _note_unstepped(self, values: WrittenValues, norm: Tensor | None) -> None:
        """The loop moves weights though an optimizer holds them, which has not stepped in this run."""
        opened = self._cycle.opened
        unscaled = self._cycle.state is State.GRADIENTS_READY  # of what follows, nothing is on the tape
        if self._unstepped and self._unstepped[-1].opened is not opened:
            self._unstepped.clear()
        if unscaled or taped_step.made_of_gradients(self._tape.calls, values.operands):
            counts = len(opened.losses), len(opened.parcels), opened.micro_batches
            self._unstepped.append(_Moved(opened, *counts, norm, opened.bad is not None))

    def _is_unstepped(self, most: int) -> bool:
        """Whether the loop has moved weights by itself more than ``most`` times, and no optimizer has stepped since."""
        moved = self._unstepped
        is_here = len(moved) > most and moved[-1].opened is self._cycle.opened and self._tape.evaluation.moved
        return is_here and not len(self._optimizers)

    def _was_by_hand(self) -> None:
        """Whatever optimizer holds the weights is none of the loop's steps: each of its own moves was one."""
        moved, self._unstepped = self._unstepped, []
        self._optimizers.rest()
        self._cycle.opened.by_hand = True
        parts = [each.since(before) for before, each in zip([None, *moved], moved, strict=False)]
        for each, part in zip(moved, parts, strict=True):
            attempt = self._attempts.begin_without(self._weights())
            attempt.opened, attempt.norm, attempt.bad = part, each.norm, each.bad
            attempt.stepped = attempt.late = True
            self._attempts.end(attempt)

    def backward_comes(self) -> None:
        """A backward is about to run; hooks on gradients may move weights inside it."""
        self._moved = False
        self._versions = None if len(self._optimizers) else self._count_writes()

    def optimizer_in_backward(self) -> None:
        """An optimizer of the run's steps inside a backward, as one for each parameter does in a hook."""
        self._moved = True

    def backward_returned(self) -> None:
        """A backward has run: if weights have moved inside it, the step is over."""
        if not self._moved and self._versions is None:
            return
        with self._own, self._guard:
            weights = self._weights()
            if self._moved or (self._versions != self._count_writes() and self._optimizers.nobody_steps(weights)):
                self._tape.weights_moved()
                self._updated_by_hand(weights, (), taken_up=False, late=True)

    def _count_writes(self) -> int:
        return sum(map(version_counter, self._weights()))

    def call_comes(self, through: Through | None) -> None:
        """A model is about to be called: where the loop gives it new weights, the step before is over."""
        if not self._cycle.is_open or self._cycle.is_busy:
            return
        if self._unstepped and may_train(through) and self._is_unstepped(MOST_UNSTEPPED - 1):
            with self._own, self._guard:
                self._was_by_hand()
        if through is None or not self._cycle.is_open:
            return
        with self._own, self._guard:
            step, doubt = self._tape.functional, self._cycle.opened.doubt
            given = step.weights_given(through)
            if step.was_updated(through):
                if self._ended_by_nobody(given):
                    step.is_over()
            elif doubt is not None and not _are_finite(given):  # they were taken up where nobody has seen it
                self._check(doubt)

    def call_returned(self, through: Through | None) -> None:
        """A model was called, in the loop's place perhaps, by what gives gradients."""
        if through is not None:
            self.gradients_given()

    def gradients_given(self) -> None:
        """The loop has got gradients: they are looked at while they are there, if nobody else will.

        What is not finite is kept until it is known what the loop makes of it: it may look at them itself, and leave
        the step out.
        """
        opened = self._cycle.opened
        if opened.bad is not None or not self._cycle.is_open or self._cycle.is_busy:
            return
        with self._own, self._guard:
            weights = self._weights()
            if self._tape.functional.asked is not None and self._optimizers.nobody_steps(weights):
                attempt = self._attempts.expected(weights)
                norm = gradients.total_norm(attempt.optimizer)
                opened.norm = norm
                if norm is not None and not norm.isfinite():
                    given_by = [*(opened.doubt.given_by if opened.doubt else ()), self._tape.functional.latest]
                    opened.norm, opened.doubt = None, Doubt(attempt, given_by, self._attempts.recording())

    def _takes_up(self, operands: Sequence[Tensor] | None) -> bool:
        """Whether gradients in doubt are in ``operands``; with None, in weights that the loop has made."""
        doubt = self._cycle.opened.doubt
        return doubt is not None and self._tape.functional.takes_up(doubt.given_by, operands)

    def _check(self, doubt: Doubt) -> None:
        """Judges gradients that the loop has not left out."""
        attempt, opened = doubt.attempt, self._cycle.opened
        self._attempts.check(attempt, doubt.recording)
        opened.norm, opened.doubt = attempt.norm, None
        opened.bad = attempt if attempt.bad else None

    def _ended_by_nobody(self, values: Sequence[Tensor] = ()) -> bool:
        """Ends the step, unless an optimizer will; returns whether it did."""
        weights = self._weights()
        by_hand = self._optimizers.nobody_steps(weights)
        if by_hand:
            taken_up = bool(values) or self._takes_up(None)
            self._updated_by_hand(weights, values, taken_up=taken_up, late=True)
        return by_hand

    def _weights(self) -> list[Tensor]:
        return [weight for _, weight in self._models.parameters.values()]

    def _updated_by_hand(
        self, weights: list[Tensor], values: Sequence[Tensor], *, taken_up: bool, late: bool = False
    ) -> None:
        """The loop moves weights.

        Args:
            weights: What it moves.
            values: What they become, where that is known: if finite, they hold no bad gradients.
            taken_up: They may hold gradients that were not finite when they were given.
            late: They have moved already.
        """
        doubt = self._cycle.opened.doubt
        if doubt is not None and taken_up and not _are_finite(values):
            self._check(doubt)
        attempt = self._attempts.begin_without(weights)
        attempt.stepped, attempt.late = True, late
        if attempt.opened.norm is None and values:
            norm = gradients.total_norm(attempt.optimizer)
            if norm is not None and not norm.isfinite() and _are_finite(values):
                attempt.opened.norm = norm
        self._attempts.without_scaler(attempt)
        self._attempts.check_the_rest(attempt)
        self._attempts.check_updates(attempt)
        if late:
            self._attempts.check_weights(attempt)
        attempt.opened.by_hand = True
        self._attempts.end(attempt)

    def left_unfinished(self, failure: BaseException | None = None) -> None:
        """The loop ends, or gives up the step, before an optimizer steps: the loss may be why, or its gradients.

        Loops look at them and stop, with backward called or not; autograd's anomaly mode does so in backward. Gradients
        are judged if they are free of a scale, and the loop has not told the scaler of them.

        Args:
            failure: An error that ended the run; one that speaks of values may have come before there was a loss.
        """
        if not self._cycle.is_open or self._tape.guard.broken:
            return
        with self._guard:
            if self._is_unstepped(0):
                self._was_by_hand()
                return
            if self._tape.functional.was_updated():
                self._ended_by_nobody()
        opened = self._cycle.opened
        if opened.bad is not None or not self._cycle.is_open:
            return
        with self._guard:
            unused = self._tape.add_missing_backward(self._own.ambient)
            if unused is not None:
                opened.backward([unused])
            opened.wait_for_losses()
            if bad := verdict.of_loss_alone(opened):
                opened.bad = self._attempts.current or self._attempts.expected(self._weights())
                self._attempts.found(opened.bad, bad)
            elif opened.micro_batches and not opened.updated:
                attempt = self._attempts.expected(self._weights())
                if opened.scaler is None or id(attempt.optimizer) in opened.norms:
                    self._attempts.check(attempt)
                    opened.bad = attempt if attempt.bad else None
            call = failed_call.of_error(failure, self._models.names, on_purpose=True) if opened.bad is None else None
            if call is not None and call.speaks_of_values and self._tape.add_backward_of_bad(self._own.ambient):
                opened.bad = self._attempts.current or self._attempts.expected(self._weights())
                self._attempts.found(opened.bad, verdict.of_error(call))


def _are_finite(values: Sequence[Tensor]) -> bool:
    """Whether there is anything, and all of it is finite; waits for the device."""
    return bool(values) and all(map(light_statistics.finite, values))
