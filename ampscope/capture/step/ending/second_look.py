"""A second look at a step that went well: whether its gradients lost to half precision what float32 keeps.

Exact zeros and very small gradients are read off at a few steps, at the cost of one pass over them. Where they are
suspicious, one replay in float32 tells precision apart from mathematics: dead units, idle experts and converged losses
have the same zeros there. A step that did lose something is recorded as an incident, before its optimizer has moved.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict

import torch
from torch import Tensor

from ampscope.capture.budgets import EARLY_STEPS, ReplayBudget
from ampscope.capture.events.observer import StepObserver
from ampscope.capture.events.open_step import StepAttempt
from ampscope.capture.record.run_recorder import Evidence, Recorder
from ampscope.capture.replay import player, step_replay
from ampscope.capture.replay.changes import EverythingIn, ReplayChange
from ampscope.capture.replay.cures.gradient_trials import gradient_trials, trial
from ampscope.capture.replay.results import ChangedResult, Regained, ReplayResult
from ampscope.capture.replay.step_tape import StepTape
from ampscope.capture.replay.tape.taped_step import TapedStep
from ampscope.capture.step.cycle import State, StepCycle
from ampscope.capture.step.ending.incidents import Incidents
from ampscope.capture.step.measures import gradients, lost_gradients
from ampscope.capture.step.measures.lost_gradients import Sign, Signs
from ampscope.capture.torch_support.dtypes import HALF
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.tracing.sites import Sites
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.capture.tracing.tracer import Tracer
from ampscope.provenance import absorbed, cancelled, lost_mass
from ampscope.trace.schema import Node, ReplayStatus, Source, Trial, Trigger, source_of

#: Zeros of a gradient that float32 has too may become more by this share before they are looked at again.
_MORE_ZEROS = 0.25
#: Steps after which another look is run again, at the latest; in the first steps it takes twice as many as before.
_APART = 2 * gradients.RECORD_EVERY
#: Gradients that are smaller by this factor than those of an earlier look, at a loss that has fallen by the other one,
#: belong to a training that has come to its end.
_CONVERGED, _FALLEN = 0.05, 0.2


class SecondLook(StepObserver):
    """Looks at the gradients of some good steps before their optimizer moves.

    Args:
        models: The watched models.
        recorder: Where rows go.
        incidents: Reports what was lost.
        tape: What a replay needs.
        budget: Whether it can be afforded.
        cycle: Where the step is.
        guard: Catches faults of looking.
    """

    def __init__(
        self,
        models: Models,
        recorder: Recorder,
        incidents: Incidents,
        tape: StepTape,
        budget: ReplayBudget,
        cycle: StepCycle,
        guard: Guard,
    ) -> None:
        self.guard = guard
        self._models = models
        self._recorder = recorder
        self._incidents = incidents
        self._tape = tape
        self._budget = budget
        self._cycle = cycle
        self._steps: dict[int, int] = defaultdict(int)  # seen of each optimizer
        self._explained: dict[str, Sign] = {}  # signs that float32 showed too, or that were reported
        self._largest = 0.0  # norm of all gradients at any look
        self._highest = 0.0  # loss, likewise
        self._vanished = False  # all gradients of the step before were zero
        self._signs: Signs | None = None  # of the attempt in progress
        self._next = 0  # step before which nothing more is run again

    def attempt_began(self, attempt: StepAttempt) -> None:
        """Measures the gradients of a step that is looked at, before somebody waits for them anyway."""
        due = not self._tape.broken and _is_due(self._steps[attempt.index]) and self._is_half()
        scaled = attempt.scaling is not None and id(attempt.optimizer) not in attempt.opened.norms
        self._signs = self._measure(attempt, scaled=scaled) if due else None

    def optimizer_steps(self, attempt: StepAttempt) -> None:
        """Looks at the gradients that the optimizer is about to use, if this is one of the steps that are looked at."""
        number = self._steps[attempt.index]
        self._steps[attempt.index] += 1
        if attempt.bad or self._tape.broken or not (_is_due(number) or self._has_vanished(attempt)):
            return
        if not self._is_half():
            return
        loss = self._compare(attempt)
        signs = self._signs or self._measure(attempt, scaled=attempt.on_device)
        scale, found = signs.scale, signs.suspicious()
        new = {name: sign for name, sign in found.items() if self._is_new(name, sign)}
        if not new or number < self._next or not self._budget.allows_look():
            return
        recording = self._tape.recording()
        if not _of_others(recording):
            with self._cycle.inside(State.JUDGING):
                started = time.perf_counter()
                self._look(attempt, recording._replace(scale=scale), loss)
                attempt.judging_s += time.perf_counter() - started
        self._explained |= found
        self._next = number + min(number, _APART)

    def _has_vanished(self, attempt: StepAttempt) -> bool:
        """Whether all gradients are zero, and those of the step before were not; no wait, see `SpikeEnding`."""
        norm = None if attempt.on_device else _norm(attempt)
        before, self._vanished = self._vanished, norm is not None and attempt.opened.number(norm) == 0.0
        return self._vanished and not before and self._largest > 0.0

    def _measure(self, attempt: StepAttempt, *, scaled: bool) -> Signs:
        scale = attempt.scaling.scale if attempt.scaling is not None else None
        return Signs(attempt.optimizer, self._models, scale, scaled=scaled)

    def _is_half(self) -> bool:
        """Whether the step computed in half precision: by what was traced so far, else by where its tape ran."""
        computed = self._recorder.sites.computed_in(HALF)
        if computed is not None:
            return computed
        return any(e.state.ambient.autocast_dtype in HALF for e in self._tape.recording().tape.entries)

    def _is_new(self, name: str, sign: Sign) -> bool:
        known = self._explained.get(name)
        return known is None or sign.zeros > known.zeros + _MORE_ZEROS or (sign.tiny and not known.tiny)

    def _compare(self, attempt: StepAttempt) -> float:
        """Notes the sizes of gradients and loss; returns the loss, NaN where it is not known."""
        norm = _norm(attempt)
        if norm is not None:
            self._largest = max(self._largest, attempt.opened.number(norm))
        loss = attempt.opened.known_loss()
        if loss is None:
            mean = attempt.opened.mean_loss()
            loss = float(mean) if mean is not None else math.nan
        self._highest = max(self._highest, loss if math.isfinite(loss) else 0.0)
        return loss

    def _has_converged(self, norm: float, loss: float) -> bool:
        return norm < _CONVERGED * self._largest and loss < _FALLEN * self._highest

    def _look(self, attempt: StepAttempt, recording: TapedStep, loss: float) -> None:
        """Runs the step in float32, and reports what the real one lost beside that."""
        wide = self._run(recording, EverythingIn(torch.float32))
        if wide.reason:
            return
        norm = lost_gradients.total_norm(wide.gradients)
        self._largest = max(self._largest, norm)
        ours: dict[str, Tensor] = dict(gradients.owned(attempt.optimizer, self._models))
        if attempt.on_device and recording.scale:
            ours = {name: gradient / recording.scale for name, gradient in ours.items()}
        suspects = lost_gradients.lost_shares(ours, wide.gradients)
        if suspects and not self._has_converged(norm, loss):
            self._confirm(attempt, recording, wide, frozenset(suspects))

    def _confirm(self, attempt: StepAttempt, recording: TapedStep, wide: Regained, suspects: frozenset[str]) -> None:
        """Runs the step as it was: what the loop did to gradients by itself is no loss, nor are roundings."""
        source, source_wide = (source_of(each, attempt.index) for each in (Source.REPLAY, Source.REPLAY_FP32))
        ours, rows = self._traced(recording, ReplayChange(), suspects)
        shares = {k: v for k, v in lost_gradients.lost_shares(ours.gradients, wide.gradients).items() if k in suspects}
        if not shares or ours.reason:
            return
        status = ReplayStatus.DIVERGED if ours.differences else ReplayStatus.EXACT
        outcome = ReplayResult(status, "; ".join(ours.differences), ours.seconds)
        divided_away = [origin.seq for origin in absorbed(rows.graph())]
        if divided_away:  # then zeros come of an infinity, whatever else was lost
            attempt.traced = source
            self._recorder.trace(*rows.labelled(attempt.step, source), attempt.step, source)
            evidence = Evidence(bad_params=tuple(sorted(shares)), details={"ops": divided_away})
            self._incidents.report(attempt, Trigger.ABSORBED_OVERFLOW, outcome, evidence)
            return
        everything = EverythingIn(torch.float32)
        wide, rows_wide = self._traced(recording, everything, suspects)
        loss = lost_mass(rows.graph(), rows_wide.graph(), shares)
        if loss is None and not _stands_still(ours, rows_wide):
            return
        attempt.traced = source
        self._recorder.trace(*rows.labelled(attempt.step, source), attempt.step, source)
        self._recorder.trace(*rows_wide.labelled(attempt.step, source_wide), attempt.step, source_wide)
        of_everything = trial(everything, recording.scale, ChangedResult(Trial.FINITE, "", wide.loss, wide.seconds))
        for tried in gradient_trials(
            loss,
            rows,
            of_everything,
            lambda change: self._run(recording, change),
            lambda found: shares.keys().isdisjoint(lost_gradients.lost_shares(found.gradients, wide.gradients)),
            scale=recording.scale,
            budget=self._budget,
        ):
            self._recorder.trial(tried, step=attempt.step, optimizer=attempt.index)
        evidence = Evidence(bad_params=tuple(sorted(shares)), details={"lost": shares})
        self._incidents.report(attempt, Trigger.LOST_GRADIENT, outcome, evidence)

    def _run(self, recording: TapedStep, change: ReplayChange) -> Regained:
        """Runs the step with a change; nothing of it is recorded."""
        tracer = self._tracer(Sites(0, self._models.module_type), full=False)
        found = step_replay.regained(recording, self._models, tracer, change)
        tracer.release()
        self._budget.spent(found.seconds)
        return found

    def _traced(
        self, recording: TapedStep, change: ReplayChange, asked_for: frozenset[str]
    ) -> tuple[Regained, TracedRows]:
        """Runs the step with every statistic."""
        tracer = self._tracer(self._recorder.sites, full=True)
        found = step_replay.regained(recording, self._models, tracer, change, asked_for=asked_for)
        rows = TracedRows(*tracer.rows(0, ""), self._recorder.sites)
        tracer.release()
        self._budget.spent(found.seconds)
        return found, rows

    def _tracer(self, sites: Sites, *, full: bool) -> Tracer:
        stops = (player.call_user.__code__,)
        return Tracer(sites, self._models.names, full=full, guard=self.guard, stops=stops)


def _stands_still(ours: Regained, wide: TracedRows) -> bool:
    """Whether no parameter has a gradient at all, while float32 has some that are more than its own rounding."""
    if any(bool(gradient.any()) for gradient in ours.gradients.values()):
        return False
    graph = wide.graph()
    noise = cancelled(graph)
    sinks = [seq for seq in graph.outputs if graph.site(seq).op == Node.GRADIENT]
    return any(edge.from_seq not in noise for seq in sinks for edge in graph.inputs[seq])


def _norm(attempt: StepAttempt) -> Tensor | None:
    return attempt.norm if attempt.norm is not None else attempt.opened.norms.get(id(attempt.optimizer))


def _is_due(number: int) -> bool:
    """Whether a step is looked at: the first ones, then in powers of two, and when gradients are recorded anyway."""
    return number < EARLY_STEPS or number & (number - 1) == 0 or number % gradients.RECORD_EVERY == 0


def _of_others(recording: TapedStep) -> bool:
    """Whether its gradients hold what a replay of this step alone does not give: other steps', other ranks'."""
    return recording.had_gradients or recording.has_received() or recording.reduction() is not None
