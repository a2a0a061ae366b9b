"""A second look at a step that went well: whether its gradients lost to half precision what float32 keeps.

Exact zeros and very small gradients are read off at a few steps, at the cost of one pass over them. Where they are
suspicious, one replay in float32 tells precision apart from mathematics: dead units, idle experts and converged losses
have the same zeros there. A step that did lose something is recorded as an incident, before its optimizer has moved.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from ampscope.capture.budgets import EARLY_STEPS
from ampscope.capture.changes.replay_change import EverythingIn, ReplayChange
from ampscope.capture.changes.replay_results import ChangedResult, Regained, ReplayResult
from ampscope.capture.checks import lost_gradients
from ampscope.capture.checks.hidden_overflow import HiddenOverflow
from ampscope.capture.checks.lost_gradients import Largest, Progress, Sign, Signs, norm_of
from ampscope.capture.cures.trial_plan import gradient_trial, gradient_trials
from ampscope.capture.events import StepAttempt, StepObserver
from ampscope.capture.rerun.step_replay import Again
from ampscope.capture.step import gradients
from ampscope.capture.step.cycle import State, StepCycle
from ampscope.capture.step.incidents import Incidents
from ampscope.capture.tape.step_tape import StepTape
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.tensor_tree import HALF
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.provenance import absorbed, cancelled, lost_mass
from ampscope.trace.evidence import Evidence
from ampscope.trace.schema import Node, ReplayStatus, Trial, Trigger

#: Zeros of a gradient that float32 has too may become more by this share before they are looked at again.
_MORE_ZEROS = 0.25
#: Steps after which another look is run again, at the latest; in the first steps it takes twice as many as before.
_APART = 2 * gradients.RECORD_EVERY
#: Backwards of one step that are measured: of more, the gradients are taken as the optimizer finds them.
_MOST_BACKWARDS = 16


class SecondLook(StepObserver):
    """Looks at the gradients of some good steps before their optimizer moves.

    Args:
        again: Runs steps again, where that can be afforded.
        hidden: Tells of an overflow by which gradients were lost.
        incidents: Reports what was lost.
        tape: What a replay needs.
        cycle: Where the step is.
        progress: Tells a training that has come to its end.
        guard: Catches faults of looking.
    """

    def __init__(
        self,
        again: Again,
        hidden: HiddenOverflow,
        incidents: Incidents,
        tape: StepTape,
        cycle: StepCycle,
        progress: Progress,
        guard: Guard,
    ) -> None:
        self.guard = guard
        self._again = again
        self._hidden = hidden
        self._incidents = incidents
        self._tape = tape
        self._cycle = cycle
        self._progress = progress
        self._steps: dict[int, int] = defaultdict(int)  # seen of each optimizer
        self._explained: dict[str, Sign] = {}  # signs that float32 showed too, or that were reported
        self._vanished = False  # all gradients of the step before were zero
        self._backwards = _MOST_BACKWARDS  # that are measured yet, if the optimizer that stepped last is due next
        self._given: Largest | None = None  # gradients of the backward before, where it was
        self._signs: Signs | None = None  # of the attempt in progress
        self._next = 0  # step before which nothing more is run again

    def backward_ended(self) -> None:
        """Measures gradients as they were given, before the loop clips them."""
        self._given = None
        if self._backwards and not self._tape.guard.broken and self._computed_in():
            self._backwards -= 1
            self._given = Largest(self._again.models)

    def attempt_began(self, attempt: StepAttempt) -> None:
        """Measures the gradients of a step that is looked at, before somebody waits for them anyway."""
        due = not self._tape.guard.broken and _is_due(self._steps[attempt.index]) and self._computed_in()
        scaled = attempt.scaling is not None and id(attempt.optimizer) not in attempt.opened.norms
        self._signs = self._measure(attempt, scaled=scaled) if due else None

    def optimizer_steps(self, attempt: StepAttempt) -> None:
        """Looks at the gradients that the optimizer is about to use, if this is one of the steps that are looked at."""
        number = self._steps[attempt.index]
        self._steps[attempt.index] += 1
        self._backwards = _MOST_BACKWARDS if _is_due(number + 1) else 0
        if attempt.bad or self._tape.guard.broken or not (_is_due(number) or self._has_vanished(attempt)):
            return
        dtypes = self._computed_in()
        if not dtypes:
            return
        loss = self._progress.note(attempt)
        signs = self._signs or self._measure(attempt, scaled=attempt.on_device)
        scale, found = signs.scale, signs.suspicious(dtypes)
        new = {name: sign for name, sign in found.items() if self._is_new(name, sign)}
        if not new or number < self._next or not self._again.budget.allows_look():
            return
        recording = self._tape.recording()
        if not _of_others(recording):
            with self._cycle.inside(State.JUDGING):
                started = time.perf_counter()
                self._look(attempt, recording._replace(scale=scale), signs.factors(), loss)
                attempt.judging_s += time.perf_counter() - started
        self._explained |= found
        self._next = number + min(number, _APART)

    def _has_vanished(self, attempt: StepAttempt) -> bool:
        """Whether all gradients are zero, and those of the step before were not; no wait, see `SpikeEnding`."""
        norm = None if attempt.on_device else norm_of(attempt)
        before, self._vanished = self._vanished, norm is not None and attempt.opened.number(norm) == 0.0
        return self._vanished and not before and self._progress.largest > 0.0

    def _measure(self, attempt: StepAttempt, *, scaled: bool) -> Signs:
        scale = attempt.scaling.scale if attempt.scaling is not None else None
        return Signs(attempt.optimizer, self._again.models, scale, self._given, scaled=scaled)

    def _computed_in(self) -> frozenset[torch.dtype]:
        """The half precisions in which the run computed, by what was traced so far, else by where its tape ran."""
        computed = self._again.recorder.sites.computed_in()
        if computed is None:
            computed = frozenset(e.state.ambient.autocast_dtype for e in self._tape.recording().tape.entries)
        return HALF & computed

    def _is_new(self, name: str, sign: Sign) -> bool:
        known = self._explained.get(name)
        return known is None or sign.zeros > known.zeros + _MORE_ZEROS or (sign.tiny and not known.tiny)

    def _look(self, attempt: StepAttempt, recording: TapedStep, factors: Mapping[str, float], loss: float) -> None:
        """Runs the step in float32, and reports what the real one lost beside that."""
        wide = self._again.run(recording, EverythingIn(torch.float32))
        if wide.reason:
            return
        norm = lost_gradients.total_norm(wide.gradients)
        self._progress.saw(norm)
        ours: dict[str, Tensor] = dict(gradients.owned(attempt.optimizer, self._again.models))
        scale = (attempt.on_device and recording.scale) or 1.0
        factors = {name: scale * factors.get(name, 1.0) for name in ours}
        suspects = lost_gradients.lost_shares(ours, wide.gradients, factors)
        if suspects and not self._progress.has_ended(norm, loss):
            self._confirm(attempt, recording, wide, frozenset(suspects))

    def _confirm(self, attempt: StepAttempt, recording: TapedStep, wide: Regained, suspects: frozenset[str]) -> None:
        """Runs the step as it was: what the loop did to gradients by itself is no loss, nor are roundings."""
        ours, rows = self._again.traced(recording, ReplayChange(), suspects)
        if recording.draws:  # what it drew is known now
            wide = self._again.run(recording, EverythingIn(torch.float32))
        shares = {k: v for k, v in lost_gradients.lost_shares(ours.gradients, wide.gradients).items() if k in suspects}
        if not shares or ours.reason:
            return
        status = ReplayStatus.DIVERGED if ours.differences else ReplayStatus.EXACT
        outcome = ReplayResult(status, "; ".join(ours.differences), ours.seconds)
        divided_away = [origin.seq for origin in absorbed(rows.graph())]
        if divided_away:  # then zeros come of an infinity, whatever else was lost
            self._again.record(attempt, rows)
            evidence = Evidence(bad_params=tuple(sorted(shares)), ops=tuple(divided_away))
            self._incidents.report(attempt, Trigger.ABSORBED_OVERFLOW, outcome, evidence)
            return
        everything = EverythingIn(torch.float32)
        wide, rows_wide = self._again.traced(recording, everything, suspects)
        if self._hidden.tell(attempt, recording, (ours, rows), (wide, rows_wide)):
            return
        loss = lost_mass(rows.graph(), rows_wide.graph(), shares)
        if loss is None and not _stands_still(ours, rows_wide):
            return
        self._again.record(attempt, rows, rows_wide)
        of_everything = gradient_trial(
            everything, recording.scale, ChangedResult(Trial.FINITE, "", wide.loss, wide.seconds)
        )
        for tried in gradient_trials(
            loss,
            rows,
            of_everything,
            lambda change: self._again.run(recording, change),
            lambda found: shares.keys().isdisjoint(lost_gradients.lost_shares(found.gradients, wide.gradients)),
            scale=recording.scale,
            budget=self._again.budget,
        ):
            self._again.recorder.trial(tried, step=attempt.step, optimizer=attempt.index)
        evidence = Evidence(bad_params=tuple(sorted(shares)), lost=shares)
        self._incidents.report(attempt, Trigger.LOST_GRADIENT, outcome, evidence)


def _stands_still(ours: Regained, wide: TracedRows) -> bool:
    """Whether no parameter has a gradient at all, while float32 has some that are more than its own rounding."""
    if any(bool(gradient.any()) for gradient in ours.gradients.values()):
        return False
    graph = wide.graph()
    noise = cancelled(graph)
    sinks = [seq for seq in graph.outputs if graph.site(seq).op == Node.GRADIENT]
    return any(edge.from_seq not in noise for seq in sinks for edge in graph.inputs[seq])


def _is_due(number: int) -> bool:
    """Whether a step is looked at: the first ones, then in powers of two, and when gradients are recorded anyway."""
    return number < EARLY_STEPS or number & (number - 1) == 0 or number % gradients.RECORD_EVERY == 0


def _of_others(recording: TapedStep) -> bool:
    """Whether its gradients hold what a replay of this step alone does not give: other steps', other ranks'."""
    return bool(recording.had_gradients) or recording.has_received() or recording.reduction() is not None
