"""A loss or gradient norm far out of its band is a spike: which rows and weights made it, or the step's size."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, cast

from torch import nn

from ampscope.capture.changes.replay_change import ReplayChange
from ampscope.capture.changes.replay_results import ChangedResult, FormUsed, ReplayResult, TrialResult
from ampscope.capture.cures.optimizer_cures import USUAL_NORM, clipped, norm_of
from ampscope.capture.cures.trial_costs import unobserved
from ampscope.capture.events import StepAttempt, StepObserver
from ampscope.capture.isolation import memory
from ampscope.capture.rerun import step_replay
from ampscope.capture.rerun.optimizer_rerun import StepAgain
from ampscope.capture.rerun.step_replay import Again
from ampscope.capture.step import gradients
from ampscope.capture.step.cycle import State, StepCycle
from ampscope.capture.step.incidents import Incidents
from ampscope.capture.tape.step_tape import StepTape
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.torch_support.user_line import NOWHERE
from ampscope.trace.schema import Change, EventKind, Form, ReplayStatus, StepRow, Trial

#: Good steps that a band is made of, and how many of them it takes.
WINDOW, ENOUGH = 64, 20
#: A spike is this many times larger than the largest value of its band,
FACTOR = 10.0
#: and this many median absolute deviations of the logarithm from its median, or, where less, of its steps up and down:
#: a loss that is falling is spread wide although each step says where the next will be,
DEVIATIONS = 10.0
#: which are taken for at least this much: a factor of about 1.1.
LEAST_DEVIATION = 0.1
#: As large as this share of what it was in the first steps: what has all but vanished may come back.
SHARE_OF_FIRST = 0.5
#: Steps after which the largest value of the band is looked for again.
REVIEW_EVERY = 16


class Spike(NamedTuple):
    """A value far out of its band, with what is usual."""

    value: float
    usual: float  #: median of the band
    highest: float  #: its largest value
    steps: int  #: that it is made of


class Band:
    """One quantity over the latest good steps; every value joins it, so that what stays is soon usual.

    Cheap by keeping the largest value of the band, or one that has just left it: the band itself is looked at only
    where that is exceeded by far.
    """

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._seen = 0
        self._first = 0.0  # median of the first steps
        self._largest = math.inf
        self._is_signed = False  # such a loss has no scale on which it could be large

    def take(self, value: float) -> Spike | None:
        """Takes the value of a good step; returns the spike that it is, if it is one."""
        spike = self._far_out(value) if value > FACTOR * self._largest else None
        self._values.append(value)
        self._seen += 1
        self._is_signed |= value < 0
        if self._seen >= ENOUGH and (self._seen - ENOUGH) % REVIEW_EVERY == 0:
            self._first = self._first or median(self._values)
            self._largest = max(self._values)
        elif value > self._largest:
            self._largest = value
        return spike

    def _far_out(self, value: float) -> Spike | None:
        if self._is_signed or not math.isfinite(value) or value < SHARE_OF_FIRST * self._first:
            return None
        highest = max(self._values)
        logs = [math.log(each) for each in self._values if each > 0]
        if len(logs) < ENOUGH or value <= FACTOR * highest:
            return None
        middle = median(logs)
        spread = median(abs(each - middle) for each in logs)
        moves = median(abs(after - before) for before, after in pairwise(logs))
        deviation = max(LEAST_DEVIATION, min(spread, moves))
        if math.log(value) - middle <= DEVIATIONS * deviation:
            return None
        return Spike(value, math.exp(middle), highest, len(self._values))


#: A loss that is this many times the least of the last few has grown by far.
GROWN = 10.0
#: Of how many steps.
STEPS = 3
#: Steps of a run that are looked at.
MOST_LOOKS = 3
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
        grown = bool(before) and loss > before[-1] and loss >= GROWN * min(before) > 0
        before.append(loss)
        return grown and self._looks < MOST_LOOKS and self._again.budget.allows_look()

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


#: Spikes that are taken down; a run with more is a noisy one.
MOST_SPIKES = 32
#: Parameters that are named, those with the largest gradients.
MOST_PARAMETERS = 3
_TOO_LATE = "its numbers reached the host only after the optimizer had moved the weights"

Bands = dict[str, Band]


class SpikeEnding(StepObserver):
    """Compares each step with the good ones before it, and runs one that is far out again before the weights move.

    Args:
        again: Runs steps again with a smaller step of the optimizer; the models, and where a spike is taken down.
        incidents: Runs steps again.
        tape: What that needs.
        cycle: Where the step is.
    """

    def __init__(self, again: Again, incidents: Incidents, tape: StepTape, cycle: StepCycle) -> None:
        self.guard = again.guard
        self._models = again.models
        self._recorder = again.recorder
        self._incidents = incidents
        self._tape = tape
        self._cycle = cycle
        self._overshoot = Overshoot(again)
        self._bands: dict[int, Bands] = {}  # of each optimizer: its loss and its gradient norm
        self._told = 0

    def optimizer_steps(self, attempt: StepAttempt) -> None:
        """The optimizer is about to move the weights: the last moment at which the step can be run again."""
        if attempt.bad or attempt.on_device:
            return
        loss = attempt.opened.known_loss()
        self._look_at_growth(attempt, loss)
        norm = attempt.norm_before_clipping
        if norm is None:
            norm = attempt.opened.norms.get(id(attempt.optimizer))
        # Whoever decided that the optimizer may step has waited for the gradients, and so for their norm.
        size = None if norm is None else attempt.opened.number(norm)
        found = self._far_out(attempt.index, loss, size)
        if found:
            with self._cycle.inside(State.JUDGING):
                outcome = self._incidents.look(attempt, None if self._tape.guard.broken else self._tape.recording())
            self._take_down(attempt.step, attempt.index, found, outcome, *_shares(attempt, self._models))

    def _look_at_growth(self, attempt: StepAttempt, loss: float | None) -> None:
        """Tries a smaller step where the loss has just grown by far; no wait, see `optimizer_steps`."""
        if self._overshoot.has_grown(attempt.index, loss) and loss is not None and not self._tape.guard.broken:
            with self._cycle.inside(State.JUDGING):
                self._overshoot.look(attempt, self._tape.recording()._replace(scale=attempt.scale), loss)

    def arrived(self, attempt: StepAttempt, row: StepRow) -> None:
        """The numbers of a step that its optimizer decided on the device have reached the host."""
        if attempt.on_device and not attempt.bad and not row.skipped:
            found = self._far_out(row.optimizer, row.loss, row.grad_norm)
            if found:
                self._take_down(row.step, row.optimizer, found, ReplayResult(ReplayStatus.UNAVAILABLE, _TOO_LATE), [])

    def _far_out(self, optimizer: int, loss: float | None, norm: float | None) -> dict[str, Spike]:
        bands = self._bands.get(optimizer)
        if bands is None:
            bands = self._bands[optimizer] = {"grad_norm": Band(), "loss": Band()}
        by_norm = bands["grad_norm"].take(norm) if norm is not None else None
        by_loss = bands["loss"].take(loss) if loss is not None else None
        if by_norm is None and by_loss is None:
            return {}
        self._told += 1
        found = {"grad_norm": by_norm, "loss": by_loss} if self._told <= MOST_SPIKES else {}
        return {name: spike for name, spike in found.items() if spike is not None}

    def _take_down(
        self,
        step: int,
        optimizer: int,
        found: dict[str, Spike],
        outcome: ReplayResult,
        largest: list[Any],
        stepped: float | None = None,
    ) -> None:
        evidence = {
            "optimizer": optimizer,
            "out": {name: spike._asdict() for name, spike in found.items()},
            "parameters": largest,
            "stepped": stepped,
            "rows": outcome.few_rows._asdict() if outcome.few_rows is not None else None,
            "inputs": outcome.standing_out,
            "replay": outcome.status,
            "replay_reason": outcome.reason,
        }
        self._recorder.event(EventKind.SPIKE, step, json.dumps(evidence))


def _shares(attempt: StepAttempt, models: Models) -> tuple[list[tuple[str, float]], float]:
    """The parameters with the largest gradients, each with its share of the squared norm; waits for the device.

    With the norm of what the optimizer is given: the loop may have clipped it.
    """
    norms = {name: float(norm) for name, norm in gradients.norms_by_name(attempt.optimizer, models).items()}
    total = sum(norm**2 for norm in norms.values()) or 1.0
    largest = sorted(norms, key=lambda name: -norms[name])[:MOST_PARAMETERS]
    return [(name, norms[name] ** 2 / total) for name in largest], float(total**0.5)
