"""Steps that no optimizer ends: the loop moves weights with its own hands, or gives the step up."""

from __future__ import annotations

from torch import Tensor

from ampscope.capture.events.calls import Through
from ampscope.capture.step.ending import verdict
from ampscope.capture.step.ending.attempts import Attempts


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
        self._tape.on_weights_move(self.before_weights_move)

    def before_weights_move(self, weights: list[Tensor]) -> None:
        """The loop is about to write into ``weights``: what the step has come to is judged while they are there.

        In mid-step (SAM) the step goes on afterwards; where no optimizer holds the weights, their change ends it.
        """
        if not self._cycle.is_open or self._cycle.is_busy:
            return
        opened = self._cycle.opened
        with self._own, self._guard:
            if self._optimizers.nobody_steps(weights):
                self._updated_by_hand(weights)
            elif opened.bad is None:
                attempt = self._attempts.expected(weights)
                self._attempts.check(attempt)
                self._attempts.found(attempt, verdict.of_what_gradients_hide(attempt, [], None))
                self._attempts.check_updates(attempt)
                opened.bad = attempt if attempt.bad else None

    def call_comes(self, through: Through | None) -> None:
        """A model is about to be called: where the loop gives it new weights, the step before is over."""
        if through is None or not self._cycle.is_open or self._cycle.is_busy:
            return
        with self._own, self._guard:
            step = self._tape.functional
            if step.was_updated(through) and self._ended_by_nobody():
                step.is_over()

    def call_returned(self, through: Through | None) -> None:
        """A model was called: gradients that came of it are judged while they are there, if nobody else will."""
        opened = self._cycle.opened
        if through is None or opened.bad is not None:
            return
        with self._own, self._guard:
            weights = self._weights()
            if self._tape.functional.asked is not None and self._optimizers.nobody_steps(weights):
                attempt = self._attempts.expected(weights)
                self._attempts.check(attempt)
                opened.norm = attempt.norm
                opened.bad = attempt if attempt.bad else None

    def _ended_by_nobody(self) -> bool:
        """Ends the step, unless an optimizer will; returns whether it did."""
        weights = self._weights()
        by_hand = self._optimizers.nobody_steps(weights)
        if by_hand:
            self._updated_by_hand(weights)
        return by_hand

    def _weights(self) -> list[Tensor]:
        return [weight for _, weight in self._models.parameters.values()]

    def _updated_by_hand(self, weights: list[Tensor]) -> None:
        attempt = self._attempts.begin_without(weights)
        attempt.stepped = True
        self._attempts.without_scaler(attempt)
        self._attempts.check_the_rest(attempt)
        self._attempts.check_updates(attempt)
        self._attempts.end(attempt)

    def left_unfinished(self, *, failed: bool = False) -> None:
        """The loop ends, or gives up the step, before an optimizer steps: the loss may be why.

        Loops look at it themselves and stop, with backward called or not; autograd's anomaly mode does so in backward.

        Args:
            failed: An error ended the run; gradients that the loop itself has looked at may be why, too.
        """
        if not self._cycle.is_open or self._tape.broken:
            return
        with self._guard:
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
            elif failed and opened.micro_batches and opened.scaler is None:
                attempt = self._attempts.expected(self._weights())
                self._attempts.check(attempt)
                opened.bad = attempt if attempt.bad else None
