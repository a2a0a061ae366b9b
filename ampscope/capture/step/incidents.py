"""Judges a bad step: replays its tape under full observation and reports what came out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from ampscope.capture.budgets import TraceBudget
from ampscope.capture.changes.replay_change import ReplayChange
from ampscope.capture.changes.replay_results import ReplayResult, Symptom
from ampscope.capture.cures.cure_search import CureSearch
from ampscope.capture.cures.optimizer_cures import OptimizerAgain
from ampscope.capture.events import EndedStep, StepAttempt
from ampscope.capture.heal.cure_choice import BadStep
from ampscope.capture.heal.healer import Healer
from ampscope.capture.isolation import memory
from ampscope.capture.isolation.own_attributes import own_attributes
from ampscope.capture.loop_state.state_watch import MOST_NAMED, STATE_TRIGGERS, BadState, described_as_evidence
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.record.terminal import Terminal
from ampscope.capture.rerun.engine import LookDepth, Ran, Rerun, RerunEngine
from ampscope.capture.step.live_trace import Collapsed, LiveTrace
from ampscope.capture.step.verdict import StepVerdict
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.readback import Readback
from ampscope.capture.tracing.operand_keeper import OperandKeeper
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.provenance import absorbed, reaches_loss
from ampscope.trace.evidence import Evidence
from ampscope.trace.schema import Change, EventKind, ReplayStatus, Source, Trial, Trigger, source_of
from ampscope.trace.vocabulary import SEEN_LIVE

#: Why a step is not explained whose gradients the loop has spoilt.
UNHEARD = (
    "the gradients came out finite: the loop spoilt them by something that it had not done in the steps before; "
    "from here on it is listened to again"
)
#: Incidents only where the step suffers from them: a state may hold an infinity on purpose.
_NO_TIME_LEFT = "earlier replays have used up the time set aside for them"
_OF_STATE = (Trigger.NONFINITE_CARRIED, Trigger.CARRIED_READ)
#: Skipped steps in a row that are told as calibration; the next one is told to the user.
QUIET_SKIPS = 3


class Incidents:
    """Replays steps that went wrong, tries what cures them, and reports them.

    Args:
        engine: Runs steps again.
        recorder: Where rows go.
        readback: Brings values of the incident's row.
        live: The trace of the step in progress.
        trace_budget: Decides which steps are traced.
        guard_for: Makes the guard of a part.
        terminal: Where the user is told.
        healer: Decides what is done about it; None where nothing is.
    """

    def __init__(
        self,
        engine: RerunEngine,
        recorder: Recorder,
        readback: Readback,
        live: LiveTrace,
        trace_budget: TraceBudget,
        guard_for: Callable[[str], Guard],
        terminal: Terminal,
        healer: Healer | None = None,
    ) -> None:
        self._models = engine.models
        self._recorder = recorder
        self._readback = readback
        self._live = live
        self._trace_budget, self._replay_budget = trace_budget, engine.budget
        self._guard, self._trial_guard = guard_for("the replay"), guard_for("the trial of cures")
        self._engine, trials = engine.under(self._guard), engine.under(self._trial_guard)
        self._terminal = terminal
        self._healer = healer
        self.latest: tuple[int, int] | None = None  #: step and optimizer of the newest
        self._bad_in_a_row = 0
        self._has_said = False
        self._optimizer_again = OptimizerAgain(self._engine, trials, recorder)
        self._cure_search = CureSearch(trials)

    def judge(self, attempt: StepAttempt, bad: StepVerdict, recording: TapedStep | None) -> None:
        """Replays the step of ``attempt``, if that can be afforded, and reports it.

        Args:
            attempt: The attempt that failed.
            bad: What made it an incident.
            recording: What a replay needs; None when there is none to trust.
        """
        symptom = bad.symptom
        is_of_state = bad.trigger in _OF_STATE
        outcome = ReplayResult(ReplayStatus.UNAVAILABLE, _NO_TIME_LEFT)
        evidence = replace(bad.evidence, bad_params=tuple(sorted(symptom.gradients)))
        started = time.perf_counter()
        recording = recording and recording._replace(broken=symptom.buffers)
        if recording is None or self._guard.broken:
            outcome.reason = "the step tape or the replay had switched itself off"
        elif self._replay_budget.allows(symptom, attempt.step, bad.trigger):
            outcome.reason = "the replay itself failed; the run's events say why"
            with self._guard, memory.collector_resting(), own_attributes():
                outcome, rows, recording = self._replay(attempt, symptom, recording)
                evidence = outcome.added_to(evidence)
                evidence = replace(
                    evidence,
                    compiled=self._models.compiled,
                    called_from=recording.called_from(),
                    made_before=dict(recording.made_before),
                )
                if is_of_state and (rows is None or not _matters(rows)):
                    return
                if rows is not None:
                    self._try_cures(attempt, recording, rows, outcome)
                if self._healer is not None:
                    key = attempt.step, attempt.index
                    tried = [each for *of, each in self._recorder.tried if tuple(of) == key]
                    scaled = recording._replace(scale=attempt.scale)
                    self._healer.examine(BadStep(attempt, scaled, symptom, rows, outcome, tried))
            attempt.judging_s = time.perf_counter() - started
            self._replay_budget.judged(attempt.judging_s)
        else:
            evidence = replace(evidence, over_budget=True)
            if self._healer is not None:
                self._healer.examine(BadStep(attempt, recording, symptom, None, outcome, ()))
        if attempt.traced or not is_of_state:
            self.report(attempt, bad.trigger, outcome, evidence)

    def _replay(
        self, attempt: StepAttempt, symptom: Symptom, recording: TapedStep
    ) -> tuple[ReplayResult, TracedRows | None, TapedStep]:
        """The faithful replay, its rows where it was possible, and what was run.

        A step whose backward comes out finite is run once more with what the loop did to the gradients afterwards.
        """
        label = attempt.step, source_of(Source.REPLAY, attempt.index)
        ran, outcome, keeper = self._run_again(recording, symptom, label)
        unexplained = symptom.gradients and outcome.finite and outcome.status is not ReplayStatus.RECEIVED
        edited = recording.with_edits(self._models) if unexplained else None
        if edited is not None:
            as_given = outcome
            ran, outcome, keeper = self._run_again(edited, symptom, label)
            if edited.recalled and outcome.status is not ReplayStatus.EXACT:  # in this step it did something else
                as_given.reason = UNHEARD
                return as_given, None, recording
            recording = edited
        if outcome.status is ReplayStatus.UNAVAILABLE or outcome.failed_elsewhere:
            return outcome, None, recording
        _, attempt.traced = label
        self._recorder.trace(ran.rows.ops, ran.rows.edges, *label)
        if keeper is not None:
            self._recorder.operands.write(keeper, ran.rows, optimizer=attempt.index)
        return outcome, ran.rows, recording

    def _run_again(
        self, recording: TapedStep, symptom: Symptom, label: tuple[int, str]
    ) -> tuple[Ran, ReplayResult, OperandKeeper | None]:
        keeper = self._recorder.operands.keeper()
        ran = self._engine.run(
            Rerun(
                recording,
                ReplayChange(),
                LookDepth.FULL,
                real=symptom,
                after_good_step=not self._bad_in_a_row,
                keeper=lambda _: keeper,
                label=label,
            )
        )
        assert ran.replay is not None
        return ran, ran.replay, keeper

    def _try_cures(self, attempt: StepAttempt, recording: TapedStep, rows: TracedRows, replay: ReplayResult) -> None:
        if self._trial_guard.broken:
            return
        with self._trial_guard:
            recording = recording._replace(scale=attempt.scale)
            for run in self._cure_search.examine(recording, rows, replay):
                self._recorder.trial(run.trial, step=attempt.step, optimizer=attempt.index)
                if run.trial.change is Change.FP32 and run.trial.result.outcome is not Trial.UNAVAILABLE:
                    source = source_of(Source.REPLAY_FP32, attempt.index)
                    self._recorder.trace(*run.rows.labelled(attempt.step, source), attempt.step, source)

    def trace_by_replay(self, attempt: StepAttempt, recording: TapedStep) -> None:
        """Records the ops of a healthy step that could not be traced as it ran (compiled code)."""
        with self._guard:
            self._replay(attempt, Symptom(), recording)

    def look(self, attempt: StepAttempt, recording: TapedStep | None) -> ReplayResult:
        """Runs a step again that is finite, but far out of the ordinary, if that can be afforded.

        Args:
            attempt: Its attempt, before the optimizer has moved the weights.
            recording: What a replay needs; None when there is none to trust.
        """
        if recording is None or self._guard.broken:
            return ReplayResult(ReplayStatus.UNAVAILABLE, "the step tape or the replay had switched itself off")
        outcome = ReplayResult(ReplayStatus.UNAVAILABLE, _NO_TIME_LEFT)
        if self._replay_budget.allows_look():
            started = time.perf_counter()
            with self._guard:
                outcome, *_ = self._replay(attempt, Symptom(), recording)
            attempt.judging_s += time.perf_counter() - started
        return outcome

    def report(self, attempt: StepAttempt, trigger: Trigger, outcome: ReplayResult, evidence: Evidence) -> None:
        """Writes the incident's row; the live trace too, unless an exact replay makes it superfluous."""
        attempt.bad = True
        self.latest = (attempt.step, attempt.index)
        if outcome.status is not ReplayStatus.EXACT and not attempt.over:  # what is traced now is another step
            self._live.write_incident(attempt)
        blind = outcome.status in (ReplayStatus.NOT_REPRODUCED, ReplayStatus.UNAVAILABLE)
        if blind and not evidence.over_budget:
            self._trace_budget.arm()
        scale = attempt.scaling.scale if attempt.scaling is not None else None
        self._readback.fetch(
            {"loss": attempt.opened.mean_loss(), "scale": scale},
            lambda values: self._recorder.incident(
                trigger,
                step=attempt.step,
                optimizer=attempt.index,
                loss=values["loss"],
                scale=values["scale"],
                outcome=outcome,
                evidence=evidence,
            ),
        )
        self._tell(attempt, trigger, outcome)

    @property
    def sees_ops(self) -> bool:
        """Whether the step in progress is traced."""
        return self._live.active

    def look_at_weights(self, attempt: StepAttempt, *, of_any_dtype: bool = False) -> None:
        """Reports an optimizer that made weights non-finite, as far as the live trace of its step shows.

        Args:
            attempt: Of that step.
            of_any_dtype: Not only where some are kept in half precision, which finite gradients may take out of range.
        """
        poisoned = [] if attempt.bad else self._live.poisoned_weights(of_any_dtype=of_any_dtype)
        if poisoned:
            reason = "an optimizer step is traced as it runs; only the optimizer is run again, on copies"
            outcome = ReplayResult(ReplayStatus.UNAVAILABLE, reason)
            self._optimizer_again.try_cures(attempt, poisoned)
            self.report(attempt, Trigger.NONFINITE_WEIGHT, outcome, Evidence(bad_params=tuple(poisoned)))

    def state_turned_bad(self, bad: BadState) -> None:
        """Reports tensors that outlive a step and are not finite after one, though nothing in the step told."""
        kinds = {held.kind for held, _ in bad.held}
        trigger = STATE_TRIGGERS[kinds.pop()] if len(kinds) == 1 else Trigger.NONFINITE_STATE
        outcome = ReplayResult(ReplayStatus.UNAVAILABLE, "the state was looked at between two steps, not in one")
        step = min(seen.bad_at for _, seen in bad.held)
        evidence = Evidence(
            bad_params=tuple(held.key for held, _ in bad.held[:MOST_NAMED]), state=described_as_evidence(bad)
        )
        if bad.attempt is not None:
            self._optimizer_again.show(bad.attempt, [held.owner or held.name for held, _ in bad.held])
            self.report(bad.attempt, trigger, outcome, evidence)
            return
        self._recorder.incident(
            trigger, step=step, optimizer=bad.optimizer, loss=None, scale=None, outcome=outcome, evidence=evidence
        )
        if not self._bad_in_a_row:
            self._terminal.incident(in_words(trigger), step, outcome.status, outcome.reason)

    def absorbed(self, attempt: StepAttempt, ops: list[int]) -> None:
        """Reports overflows, by sequence number, that vanished again before loss and gradients."""
        outcome = ReplayResult(ReplayStatus.UNAVAILABLE, SEEN_LIVE)
        self.report(attempt, Trigger.ABSORBED_OVERFLOW, outcome, Evidence(ops=tuple(ops)))

    def collapsed(self, attempt: StepAttempt, casts: Mapping[int, Collapsed]) -> None:
        """Reports casts, by sequence number, that made few values of many; the step itself went well."""
        outcome = ReplayResult(ReplayStatus.UNAVAILABLE, SEEN_LIVE)
        counts = {seq: (each.values.before, each.values.after) for seq, each in casts.items()}
        changed = {seq: (each.values.changed, each.values.of) for seq, each in casts.items() if each.values.changed}
        before = {seq: each.before.told(each.since) for seq, each in casts.items() if each.before is not None}
        evidence = Evidence(distinct=counts, changed=changed, cast_before=before)
        trigger, step = Trigger.INFORMATION_LOST, attempt.step
        self._recorder.incident(
            trigger, step=step, optimizer=attempt.index, loss=None, scale=None, outcome=outcome, evidence=evidence
        )
        self._terminal.incident(in_words(trigger), step, outcome.status, outcome.reason)

    def cannot_follow(self, attempt: StepAttempt) -> None:
        """Says, once, of what a scaler was told to step, that its steps are counted and not looked into."""
        if not self._has_said:
            self._has_said = True
            text = (
                f"scaler.step was given a {type(attempt.handed).__name__}, which torch's optimizer hooks do not hear: "
                "its steps and skips are counted, but what it keeps is not looked at"
            )
            self._recorder.event(EventKind.NOTE, attempt.step, text)
            self._terminal.line(text)

    def passed(self, ended: EndedStep) -> None:
        """An attempt is over; the time that tracing it took counts for the budget."""
        attempt = ended.attempt
        if not attempt.bad:
            self._bad_in_a_row = 0
        self._terminal.passed()
        traced = self._live.began or bool(attempt.traced)
        self._trace_budget.took(ended.number, ended.seconds - attempt.judging_s, traced=traced)

    def _tell(self, attempt: StepAttempt, trigger: Trigger, outcome: ReplayResult) -> None:
        """Prints one line for each series of bad steps; a scaler's first skips are told only when they do not end."""
        self._bad_in_a_row += 1
        calibrates = trigger is Trigger.NONFINITE_GRADIENT and attempt.scaling is not None and not attempt.stepped
        if self._bad_in_a_row != (QUIET_SKIPS + 1 if calibrates else 1):
            return
        told = in_words(trigger), attempt.step, outcome.status, outcome.reason
        self._terminal.incident(*told, elsewhere=outcome.failed_elsewhere)


def in_words(trigger: Trigger) -> str:
    """Returns the trigger of an incident in words, for the line in the terminal."""
    return trigger.replace("_", " ").replace("nonfinite", "non-finite")


def _matters(rows: TracedRows) -> bool:
    """Whether a step computed its loss from something over an infinity, which is zero."""
    graph = rows.graph()
    return any(reaches_loss(graph, origin.path[-1]) for origin in absorbed(graph))
