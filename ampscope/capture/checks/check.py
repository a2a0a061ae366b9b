"""A check asks something of a step that looks good, by running it again before its weights move; one runner for all."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, NamedTuple, TypeVar

from ampscope.capture.changes.replay_change import ReplayChange
from ampscope.capture.changes.replay_results import ChangedResult, ReplayResult, Symptom
from ampscope.capture.cures.trial_plan import gradient_trial
from ampscope.capture.events import StepAttempt, StepObserver
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.rerun.engine import Make, Ran, Rerun, RerunEngine
from ampscope.capture.rerun.optimizer_rerun import Copied
from ampscope.capture.step.incidents import Incidents
from ampscope.capture.step.verdict import StepVerdict
from ampscope.capture.tape.step_tape import StepTape
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support.guard import Guard
from ampscope.trace.evidence import Evidence
from ampscope.trace.schema import ReplayStatus, Source, Trigger, source_of


class CheckFinding(NamedTuple):
    """A check that has found something ends with this, which makes the step an incident."""

    trigger: Trigger
    evidence: Evidence
    recording: TapedStep
    outcome: ReplayResult | None = None  #: of a faithful replay that was recorded; None where one is to be made


T = TypeVar("T")
#: A generator that yields a step, or an optimizer's, to be run again, is sent what came out, and ends with a result.
Reruns = Generator[Rerun | Make, Any, T]
#: A check ends with what it has found.
Asks = Reruns[CheckFinding | None]


class CheckContext(NamedTuple):
    """Holds all that any check needs of its run."""

    engine: RerunEngine  #: runs steps again, under the guard of the check
    recorder: Recorder  #: where rows go
    tape: StepTape  #: the step in progress
    incidents: Incidents  #: reports what was found

    def under(self, guard: Guard) -> CheckContext:
        """The same for a check with this guard."""
        return self._replace(engine=self.engine.under(guard))


class Check(StepObserver):
    """One question to steps that look good; a subclass says when it is `due`, and asks it.

    Args:
        context: What it needs of its run.

    Attributes:
        free_looks: Looks that are made whatever they cost.
        needs_tape: Whether it asks nothing of a step of which no tape is to be trusted.
    """

    free_looks = 0
    needs_tape = True

    def __init__(self, context: CheckContext) -> None:
        self.guard = context.engine.guard
        self.engine, self.recorder, self.tape, self.incidents = context
        self.looks = 0  #: that were made

    def due(self, attempt: StepAttempt) -> Asks | None:
        """Whether to look at a good step whose optimizer is about to move the weights; the questions, or None."""
        raise NotImplementedError

    def affords(self) -> bool:
        """Whether a look that is due may be made."""
        return self.engine.budget.allows_look(whatever_it_costs=self.looks < self.free_looks)

    def optimizer_steps(self, attempt: StepAttempt) -> None:
        """Asks, where that is due and can be afforded."""
        if attempt.bad or (self.needs_tape and self.tape.guard.broken):
            return
        asks = self.due(attempt)
        if asks is not None and self.affords():
            self.ask(attempt, asks)

    def ask(self, attempt: StepAttempt, asks: Asks) -> None:
        """Runs again what is asked for, one after the other, and reports what was found."""
        self.looks += 1
        found: CheckFinding | None = None
        answer: Ran | Copied | None = None
        started = time.perf_counter()
        try:
            while True:
                request = asks.send(answer)
                answer = self.engine.run(request) if isinstance(request, Rerun) else self.engine.step(request)
        except StopIteration as end:
            found = end.value
        attempt.judging_s += time.perf_counter() - started
        if found is None:
            return
        if found.outcome is None:
            self.incidents.judge(attempt, StepVerdict(found.trigger, Symptom(), found.evidence), found.recording)
        else:
            self.incidents.report(attempt, found.trigger, found.outcome, found.evidence)

    # -- what a check may write besides -------------------------------------------------------------------------

    def record(self, attempt: StepAttempt, ours: Ran, wide: Ran | None = None) -> ReplayResult:
        """Writes the trace of the step as it was, and of the same in float32; returns the outcome of the first."""
        attempt.traced = source_of(Source.REPLAY, attempt.index)
        self.recorder.trace(*ours.rows.labelled(attempt.step, attempt.traced), attempt.step, attempt.traced)
        if wide is not None:
            source = source_of(Source.REPLAY_FP32, attempt.index)
            self.recorder.trace(*wide.rows.labelled(attempt.step, source), attempt.step, source)
        status = ReplayStatus.DIVERGED if ours.differences else ReplayStatus.EXACT
        return ReplayResult(status, "; ".join(ours.differences), ours.seconds)

    def tried(self, attempt: StepAttempt, recording: TapedStep, change: ReplayChange, result: ChangedResult) -> None:
        """Writes what a change came to."""
        made = gradient_trial(change, recording.scale, result)
        self.recorder.trial(made, step=attempt.step, optimizer=attempt.index)
