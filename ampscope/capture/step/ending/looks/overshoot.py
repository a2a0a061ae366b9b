"""Whether the optimizer's own step makes a loss grow that has just grown by far, and which smaller step does not."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import cast

from torch import nn

from ampscope.capture.events.open_step import StepAttempt
from ampscope.capture.replay import memory, step_replay
from ampscope.capture.replay.changes import ReplayChange
from ampscope.capture.replay.cures.costs import unobserved
from ampscope.capture.replay.results import ChangedResult, FormUsed, TrialResult
from ampscope.capture.replay.tape.taped_step import TapedStep
from ampscope.capture.step.ending.looks.again import Again
from ampscope.capture.step.ending.optimizer_again.cures import USUAL_NORM, clipped, norm_of
from ampscope.capture.step.ending.optimizer_again.rerun import StepAgain
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.torch_support.user_line import NOWHERE
from ampscope.trace.schema import Change, Form, Trial

#: A loss that is this many times the least of the last few has grown by far.
FACTOR = 10.0
#: Of how many steps.
STEPS = 3
#: Steps of a run that are looked at.
MOST = 3
#: What a learning rate is multiplied by, until one lowers the loss.
SHARES = (0.1, 0.01, 1e-3, 1e-4)
#: Times the optimizer's weights that the copies take: weights, gradients, and two of state.
_COPIES = 4


class WeightsMoved(ReplayChange):
    """Other values of some parameters.

    Args:
        instead: The parameters to read, by ``id`` of those in whose place they stand.
    """

    kind = Change.FORM

    def __init__(self, instead: Mapping[int, nn.Parameter]) -> None:
        super().__init__()
        self.weights = instead


class Overshoot:
    """Looks at steps whose loss has just grown by far, before their optimizer moves the weights.

    Args:
        again: Runs steps again, where that can be afforded.
    """

    def __init__(self, again: Again) -> None:
        self._again = again
        self._losses: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=STEPS))  # by number of the optimizer
        self._looks = 0

    def has_grown(self, optimizer: int, loss: float | None) -> bool:
        """Takes the loss of a good step, as far as the host knows it; says whether to look at the step."""
        if loss is None or not math.isfinite(loss):
            return False
        before = self._losses[optimizer]
        grown = bool(before) and loss > before[-1] and loss >= FACTOR * min(before) > 0
        before.append(loss)
        return grown and self._looks < MOST and self._again.budget.allows_look()

    def look(self, attempt: StepAttempt, recording: TapedStep, loss: float) -> None:
        """Records which smaller steps lower the loss of the step's own batch, where the step as it is to be does not.

        Args:
            attempt: Its gradients are as the optimizer will use them.
            recording: What a replay needs.
            loss: Of the step.
        """
        self._looks += 1
        started = time.perf_counter()
        again = self._optimizer(attempt)
        possible = not _is_of_others(recording) and not step_replay.why_not(recording, self._again.models)
        if again is not None and possible:
            for trial in self._trials(again, recording, loss):
                self._again.recorder.trial(trial, step=attempt.step, optimizer=attempt.index)
        attempt.judging_s += time.perf_counter() - started

    def _optimizer(self, attempt: StepAttempt) -> StepAgain | None:
        """The optimizer's step on all that it steps; None where that cannot be had on copies."""
        models = self._again.models
        view = OptimizerView(attempt.optimizer)
        known = {id(p): (name, cast(nn.Parameter, p)) for name, p in models.parameters.values()}
        with_gradients = [p for p in view.parameters if p.grad is not None]
        size = _COPIES * sum(p.nbytes for p in with_gradients)
        if not all(id(p) in known for p in with_gradients) or not memory.fits(size, models.main_device()):
            return None
        return StepAgain.before_it(attempt.optimizer, dict(known[id(p)] for p in with_gradients))

    def _trials(self, again: StepAgain, recording: TapedStep, loss: float) -> Iterator[TrialResult]:
        as_it_is = self._after(again, recording)
        if as_it_is.outcome is Trial.UNAVAILABLE or _lowers(as_it_is, recording, loss):
            return
        rate = OptimizerView(again.source).learning_rate
        name = type(again.source).__name__
        if rate is not None:
            rate = float(rate)
            for share in SHARES:
                found = _judged(self._after(again, recording, share=share), recording, loss)
                if found.outcome is not Trial.NONFINITE or share == SHARES[-1]:
                    used = FormUsed(Form.SMALLER_STEP, name, NOWHERE, None, share * rate, rate)
                    yield TrialResult(Change.FORM, (), (), recording.scale, found, form=used)
                    break
        norm = norm_of(again.parameters)
        if norm > USUAL_NORM:
            found = _judged(self._after(again, recording, kept=USUAL_NORM / norm), recording, loss)
            used = FormUsed(Form.CLIPPED, name, NOWHERE, None, USUAL_NORM, norm)
            yield TrialResult(Change.FORM, (), (), recording.scale, found, form=used)

    def _after(self, again: StepAgain, recording: TapedStep, *, share: float = 1.0, kept: float = 1.0) -> ChangedResult:
        """The step's own batch again, on the weights that the optimizer leaves with a ``share`` of its learning rate.

        Args:
            again: The optimizer's step.
            recording: The step.
            share: Of the learning rate.
            kept: Share of the gradients.
        """
        models = self._again.models
        copied = again.copied()
        OptimizerView(copied.optimizer).adjust("lr", lambda rate: rate * share)
        clipped(copied, kept)
        if not again.play(copied, models):
            return ChangedResult(Trial.UNAVAILABLE, "the optimizer does not step on copies")
        moved = {id(parameter): copied.parameters[name] for name, parameter in again.parameters.items()}
        tracer = unobserved(models, self._again.guard)
        found = step_replay.retry(recording, models, tracer, WeightsMoved(moved))
        self._again.budget.spent(found.seconds)
        return found


def _judged(found: ChangedResult, recording: TapedStep, loss: float) -> ChangedResult:
    """A run that cures only where the loss is lower than it was."""
    if found.outcome is Trial.FINITE and not _lowers(found, recording, loss):
        return found._replace(outcome=Trial.NONFINITE)
    return found


def _lowers(found: ChangedResult, recording: TapedStep, loss: float) -> bool:
    after = found.loss / (recording.scale or 1.0) if found.loss is not None else math.inf
    return found.outcome is Trial.FINITE and after < loss


def _is_of_others(recording: TapedStep) -> bool:
    """Whether its gradients hold what a replay of this step alone does not give: other steps', other ranks'."""
    return bool(recording.had_gradients) or recording.has_received() or recording.reduction() is not None
