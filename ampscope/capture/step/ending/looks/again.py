"""Runs a step that went well again, as it was or with something changed, for its gradients and its trace."""

from __future__ import annotations

from ampscope.capture.budgets import ReplayBudget
from ampscope.capture.events.open_step import StepAttempt
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.replay import player, step_replay
from ampscope.capture.replay.changes import ReplayChange
from ampscope.capture.replay.results import Regained
from ampscope.capture.replay.tape.taped_step import TapedStep
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.tracing.sites import Sites
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.capture.tracing.tracer import Tracer
from ampscope.trace.schema import Source, source_of


class Again:
    """Runs steps again, at the cost of the replays' budget.

    Args:
        models: The watched models.
        recorder: Where rows go.
        budget: What it costs.
        guard: Catches faults of looking.
    """

    def __init__(self, models: Models, recorder: Recorder, budget: ReplayBudget, guard: Guard) -> None:
        self.models = models
        self.recorder = recorder
        self.budget = budget
        self.guard = guard

    def run(self, recording: TapedStep, change: ReplayChange) -> Regained:
        """Runs the step with a change; nothing of it is recorded."""
        tracer = self._tracer(Sites(0, self.models.module_type), full=False)
        found = step_replay.regained(recording, self.models, tracer, change)
        tracer.release()
        self.budget.spent(found.seconds)
        return found

    def traced(
        self, recording: TapedStep, change: ReplayChange, asked_for: frozenset[str]
    ) -> tuple[Regained, TracedRows]:
        """Runs the step with every statistic, and with the gradients that are asked for as sinks."""
        tracer = self._tracer(self.recorder.sites, full=True)
        found = step_replay.regained(recording, self.models, tracer, change, asked_for=asked_for)
        rows = TracedRows(*tracer.rows(0, ""), self.recorder.sites)
        tracer.release()
        self.budget.spent(found.seconds)
        return found, rows

    def record(self, attempt: StepAttempt, rows: TracedRows, wide: TracedRows | None = None) -> None:
        """Writes the trace of the step as it was, and of the same in float32."""
        attempt.traced = source_of(Source.REPLAY, attempt.index)
        self.recorder.trace(*rows.labelled(attempt.step, attempt.traced), attempt.step, attempt.traced)
        if wide is not None:
            source = source_of(Source.REPLAY_FP32, attempt.index)
            self.recorder.trace(*wide.labelled(attempt.step, source), attempt.step, source)

    def _tracer(self, sites: Sites, *, full: bool) -> Tracer:
        stops = (player.call_user.__code__,)
        return Tracer(sites, self.models.names, full=full, guard=self.guard, stops=stops)
