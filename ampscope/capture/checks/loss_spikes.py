"""A loss or gradient norm far out of its band is a spike: which rows and weights made it, or the step's size."""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, cast

from torch import nn

from ampscope.capture.changes.replay_change import ReplayChange
from ampscope.capture.changes.replay_results import FormUsed, ReplayResult, TrialResult
from ampscope.capture.checks.check import Asks, Check, CheckContext, Reruns
from ampscope.capture.cures.optimizer_cures import USUAL_NORM, clipped, norm_of
from ampscope.capture.events import StepAttempt
from ampscope.capture.isolation import memory
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.rerun import obstacles
from ampscope.capture.rerun.engine import LookDepth, Ran, Rerun
from ampscope.capture.rerun.optimizer_rerun import Copied, StepAgain
from ampscope.capture.step import gradients
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


class Growth:
    """The losses of the latest good steps: whether one has just grown by far."""

    def __init__(self) -> None:
        self._losses: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=STEPS))  # by number of the optimizer

    def takes(self, optimizer: int, loss: float | None) -> bool:
        """Takes the loss of a good step, as far as the host knows it; says whether it has."""
        if loss is None or not math.isfinite(loss):
            return False
        before = self._losses[optimizer]
        grown = bool(before) and loss > before[-1] and loss >= GROWN * min(before) > 0
        before.append(loss)
        return grown


class SmallerSteps:
    """Asks which smaller steps lower the loss of a step's own batch, where the step as it is to be does not.

    Args:
        attempt: Its gradients are as the optimizer will use them.
        again: The optimizer's step.
        recording: The step.
        loss: Of the step.
    """

    def __init__(self, attempt: StepAttempt, again: StepAgain, recording: TapedStep, loss: float) -> None:
        self._attempt = attempt
        self._again = again
        self._recording = recording
        self._loss = loss

    def asks(self, recorder: Recorder) -> Asks:
        """Runs the step on the weights that the optimizer leaves, and records what lowers its loss."""
        as_it_is = yield from self._after()
        if as_it_is is None or as_it_is.reason or self._lowers(as_it_is):
            return None
        rate = OptimizerView(self._again.source).learning_rate
        if rate is not None:
            for share in SHARES:
                ran = yield from self._after(share=share)
                if ran is None or ran.reason or self._lowers(ran) or share == SHARES[-1]:
                    self._record(recorder, ran, Form.SMALLER_STEP, share * float(rate), float(rate))
                    break
        norm = norm_of(self._again.parameters)
        if norm > USUAL_NORM:
            ran = yield from self._after(kept=USUAL_NORM / norm)
            self._record(recorder, ran, Form.CLIPPED, USUAL_NORM, norm)
        return None

    def _after(self, *, share: float = 1.0, kept: float = 1.0) -> Reruns[Ran | None]:
        """The step's own batch again, on the weights that the optimizer leaves; None where it does not step on copies.

        Args:
            share: Of the learning rate.
            kept: Share of the gradients.
        """

        def adjust(copied: Copied) -> None:
            copied.adjust("lr", lambda rate: rate * share)
            clipped(copied, kept)

        copied: Copied | None = yield partial(self._again.made, adjust=adjust)
        if copied is None:
            return None
        moved = {id(parameter): copied.parameters[name] for name, parameter in self._again.parameters.items()}
        ran: Ran = yield Rerun(self._recording, WeightsMoved(moved), LookDepth.NONE)
        return ran

    def _lowers(self, ran: Ran) -> bool:
        return ran.outcome is Trial.FINITE and ran.loss is not None and ran.loss / ran.scale < self._loss

    def _record(self, recorder: Recorder, ran: Ran | None, form: Form, value: float, was: float) -> None:
        """Records a step that cures only where the loss is lower than it was."""
        ran = ran or Ran(reason="the optimizer does not step on copies")
        used = FormUsed(form, type(self._again.source).__name__, NOWHERE, None, value, was)
        result = ran.result_if(cured=self._lowers(ran))
        made = TrialResult(Change.FORM, (), (), self._recording.scale, result, form=used)
        recorder.trial(made, step=self._attempt.step, optimizer=self._attempt.index)


def _is_of_others(recording: TapedStep) -> bool:
    """Whether its gradients hold what a replay of this step alone does not give: other steps', other ranks'."""
    return bool(recording.had_gradients) or recording.has_received() or recording.reduction() is not None


#: Spikes that are taken down; a run with more is a noisy one.
MOST_SPIKES = 32
#: Parameters that are named, those with the largest gradients.
MOST_PARAMETERS = 3
_TOO_LATE = "its numbers reached the host only after the optimizer had moved the weights"

Bands = dict[str, Band]


class SpikeEnding(Check):
    """Compares each step with the good ones before it, and runs one that is far out again before the weights move."""

    def __init__(self, context: CheckContext) -> None:
        super().__init__(context)
        self._growth = Growth()
        self._bands: dict[int, Bands] = {}  # of each optimizer: its loss and its gradient norm
        self._told = 0

    def optimizer_steps(self, attempt: StepAttempt) -> None:
        """The optimizer is about to move the weights: the last moment at which the step can be run again.

        A spike is taken down in any case.
        """
        if attempt.bad or attempt.on_device:
            return
        loss = attempt.opened.known_loss()
        if self._growth.takes(attempt.index, loss) and self.looks < MOST_LOOKS and self.affords():
            asks = None if loss is None or self.tape.guard.broken else self._smaller_steps(attempt, loss)
            if asks is not None:
                self.ask(attempt, asks)
        norm = attempt.norm_before_clipping
        if norm is None:
            norm = attempt.opened.norms.get(id(attempt.optimizer))
        # Whoever decided that the optimizer may step has waited for the gradients, and so for their norm.
        size = None if norm is None else attempt.opened.number(norm)
        found = self._far_out(attempt.index, loss, size)
        if found:
            outcome = self.incidents.look(attempt, None if self.tape.guard.broken else self.tape.recording())
            self._take_down(attempt.step, attempt.index, found, outcome, *_shares(attempt, self.engine.models))

    def arrived(self, attempt: StepAttempt, row: StepRow) -> None:
        """The numbers of a step that its optimizer decided on the device have reached the host."""
        if attempt.on_device and not attempt.bad and not row.skipped:
            found = self._far_out(row.optimizer, row.loss, row.grad_norm)
            if found:
                self._take_down(row.step, row.optimizer, found, ReplayResult(ReplayStatus.UNAVAILABLE, _TOO_LATE), [])

    def _smaller_steps(self, attempt: StepAttempt, loss: float) -> Asks:
        """Tries the optimizer's step on all that it steps, if that can be had on copies."""
        recording, models = self.tape.recording()._replace(scale=attempt.scale), self.engine.models
        known = {id(p): (name, cast(nn.Parameter, p)) for name, p in models.parameters.values()}
        stepped = [p for p in OptimizerView(attempt.optimizer).parameters if p.grad is not None]
        size = _COPIES * sum(p.nbytes for p in stepped)
        watched = all(id(p) in known for p in stepped) and memory.fits(size, models.main_device())
        if not watched or _is_of_others(recording) or obstacles.why_not(recording, models):
            return None
        again = StepAgain.before_it(attempt.optimizer, dict(known[id(p)] for p in stepped))
        if again is not None:
            yield from SmallerSteps(attempt, again, recording, loss).asks(self.recorder)
        return None

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
        self.recorder.event(EventKind.SPIKE, step, json.dumps(evidence))


def _shares(attempt: StepAttempt, models: Models) -> tuple[list[tuple[str, float]], float]:
    """The parameters with the largest gradients, each with its share of the squared norm; waits for the device.

    With the norm of what the optimizer is given: the loop may have clipped it.
    """
    norms = {name: float(norm) for name, norm in gradients.norms_by_name(attempt.optimizer, models).items()}
    total = sum(norm**2 for norm in norms.values()) or 1.0
    largest = sorted(norms, key=lambda name: -norms[name])[:MOST_PARAMETERS]
    return [(name, norms[name] ** 2 / total) for name in largest], float(total**0.5)
