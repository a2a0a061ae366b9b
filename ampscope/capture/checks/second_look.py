"""A second look at a step that went well: whether its gradients lost to half precision what float32 keeps.

Exact zeros and very small gradients are read off at a few steps, at the cost of one pass over them. Where they are
suspicious, one replay in float32 tells precision apart from mathematics: dead units, idle experts and converged losses
have the same zeros there. A step that did lose something is recorded as an incident, before its optimizer has moved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ampscope.capture.budgets import EARLY_STEPS
from ampscope.capture.changes.replay_change import EverythingIn, ReplayChange
from ampscope.capture.changes.replay_results import ChangedResult
from ampscope.capture.checks import lost_gradients
from ampscope.capture.checks.check import Asks, Check, CheckContext, CheckFinding
from ampscope.capture.checks.hidden_overflow import HiddenOverflow
from ampscope.capture.checks.lost_gradients import Largest, Progress, Sign, Signs, norm_of
from ampscope.capture.cures.trial_plan import gradient_changes
from ampscope.capture.events import StepAttempt
from ampscope.capture.rerun.engine import LookDepth, Ran, for_gradients
from ampscope.capture.step import gradients
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support.tensor_tree import HALF
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.provenance import absorbed, cancelled, lost_mass
from ampscope.trace.evidence import Evidence
from ampscope.trace.schema import Node, Trial, Trigger

#: Zeros of a gradient that float32 has too may become more by this share before they are looked at again.
_MORE_ZEROS = 0.25
#: Steps after which another look is run again, at the latest; in the first steps it takes twice as many as before.
_APART = 2 * gradients.RECORD_EVERY
#: Backwards of one step that are measured: of more, the gradients are taken as the optimizer finds them.
_MOST_BACKWARDS = 16


class SecondLook(Check):
    """Looks at the gradients of some good steps before their optimizer moves.

    Args:
        context: What it needs of its run.
        hidden: Tells of an overflow by which gradients were lost.
        progress: Tells a training that has come to its end.
    """

    def __init__(self, context: CheckContext, hidden: HiddenOverflow, progress: Progress) -> None:
        super().__init__(context)
        self._hidden = hidden
        self._progress = progress
        # Of each optimizer's next step, its number among those of that optimizer, and whether it is looked at.
        self._turns: dict[int, tuple[int, bool]] = defaultdict(lambda: (0, True))
        self._turn = 0, True  # of the step in progress
        self._explained: dict[str, Sign] = {}  # signs that float32 showed too, or that were reported
        self._vanished = False  # all gradients of the step before were zero
        self._backwards = _MOST_BACKWARDS  # that are measured yet, if the optimizer that stepped last is due next
        self._given: Largest | None = None  # gradients of the backward before, where it was
        self._signs: Signs | None = None  # of the attempt in progress
        self._next = 0  # step before which nothing more is run again

    def backward_ended(self) -> None:
        """Measures gradients as they were given, before the loop clips them."""
        self._given = None
        if self._backwards and not self.tape.guard.broken and self._computed_in():
            self._backwards -= 1
            self._given = Largest(self.engine.models)

    def attempt_began(self, attempt: StepAttempt) -> None:
        """Measures the gradients of a step that is looked at, before somebody waits for them anyway."""
        due = not self.tape.guard.broken and self._turns[attempt.index][1] and self._computed_in()
        scaled = attempt.scaling is not None and id(attempt.optimizer) not in attempt.opened.norms
        self._signs = self._measure(attempt, scaled=scaled) if due else None

    def optimizer_steps(self, attempt: StepAttempt) -> None:
        """Counts the steps that each optimizer makes, good and bad ones."""
        self._turn = self._turns[attempt.index]
        number, is_due = self._turn[0] + 1, _is_due(self._turn[0] + 1)
        self._turns[attempt.index] = number, is_due
        self._backwards = _MOST_BACKWARDS if is_due else 0
        super().optimizer_steps(attempt)

    def due(self, attempt: StepAttempt) -> Asks | None:
        """Whether the gradients that the optimizer is about to use show signs of loss that are new."""
        number, is_due = self._turn
        if not (is_due or self._has_vanished(attempt)):
            return None
        dtypes = self._computed_in()
        if not dtypes:
            return None
        loss = self._progress.note(attempt)
        signs = self._signs or self._measure(attempt, scaled=attempt.on_device)
        scale, found = signs.scale, signs.suspicious(dtypes)
        is_new = any(self._is_new(name, sign) for name, sign in found.items())
        if not is_new or number < self._next:
            return None
        return self._asks(attempt, self.tape.recording()._replace(scale=scale), signs, found, loss)

    def _has_vanished(self, attempt: StepAttempt) -> bool:
        """Whether all gradients are zero, and those of the step before were not; no wait, see `SpikeEnding`."""
        norm = None if attempt.on_device else norm_of(attempt)
        before, self._vanished = self._vanished, norm is not None and attempt.opened.number(norm) == 0.0
        return self._vanished and not before and self._progress.largest > 0.0

    def _measure(self, attempt: StepAttempt, *, scaled: bool) -> Signs:
        scale = attempt.scaling.scale if attempt.scaling is not None else None
        return Signs(attempt.optimizer, self.engine.models, scale, self._given, scaled=scaled)

    def _computed_in(self) -> frozenset[torch.dtype]:
        """The half precisions in which the run computed, by what was traced so far, else by where its tape ran."""
        computed = self.recorder.sites.computed_in()
        if computed is None:
            computed = frozenset(e.state.ambient.autocast_dtype for e in self.tape.recording().tape.entries)
        return HALF & computed

    def _is_new(self, name: str, sign: Sign) -> bool:
        known = self._explained.get(name)
        return known is None or sign.zeros > known.zeros + _MORE_ZEROS or (sign.tiny and not known.tiny)

    def _asks(
        self, attempt: StepAttempt, recording: TapedStep, signs: Signs, found: Mapping[str, Sign], loss: float
    ) -> Asks:
        """Runs the step in float32, and asks what the real one lost beside that."""
        number, _ = self._turn
        self._explained |= found
        self._next = number + min(number, _APART)
        if _of_others(recording):
            return None
        wide: Ran = yield for_gradients(recording, EverythingIn(torch.float32))
        if wide.reason:
            return None
        norm = lost_gradients.total_norm(wide.gradients)
        self._progress.saw(norm)
        ours: dict[str, Tensor] = dict(gradients.owned(attempt.optimizer, self.engine.models))
        scale, factors = (attempt.on_device and recording.scale) or 1.0, signs.factors()
        factors = {name: scale * factors.get(name, 1.0) for name in ours}
        suspects = lost_gradients.lost_shares(ours, wide.gradients, factors)
        if not suspects or self._progress.has_ended(norm, loss):
            return None
        return (yield from self._confirmed(attempt, recording, wide, frozenset(suspects)))

    def _confirmed(self, attempt: StepAttempt, recording: TapedStep, wide: Ran, suspects: frozenset[str]) -> Asks:
        """Runs the step as it was: what the loop did to gradients by itself is no loss, nor are roundings."""
        ours: Ran = yield for_gradients(recording, ReplayChange(), LookDepth.FULL, suspects)
        if recording.draws:  # what it drew is known now
            wide = yield for_gradients(recording, EverythingIn(torch.float32))
        shares = {k: v for k, v in lost_gradients.lost_shares(ours.gradients, wide.gradients).items() if k in suspects}
        if ours.reason:
            return None
        if not shares:
            return (yield from self._emptied(attempt, recording, suspects))
        divided_away = self._divided_away(attempt, recording, ours, shares)
        if divided_away is not None:
            return divided_away
        everything = EverythingIn(torch.float32)
        wide = yield for_gradients(recording, everything, LookDepth.FULL, suspects)
        hidden = yield from self._hidden.told(attempt, recording, ours, wide)
        if hidden is not None:
            return hidden
        loss = lost_mass(ours.rows.graph(), wide.rows.graph(), shares)
        if loss is None and not _stands_still(ours, wide.rows):
            return None
        outcome = self.record(attempt, ours, wide)
        self.tried(attempt, recording, everything, ChangedResult(Trial.FINITE, "", wide.loss, wide.seconds))
        changes = gradient_changes(loss, ours.rows, recording.scale, conversions=bool(everything.conversions))
        for number, change in enumerate(changes, 1):
            if not self.engine.budget.allows_trial(number):
                break
            found: Ran = yield for_gradients(recording, change)
            is_whole = shares.keys().isdisjoint(lost_gradients.lost_shares(found.gradients, wide.gradients))
            self.tried(attempt, recording, change, found.result_if(cured=is_whole))
        return CheckFinding(
            Trigger.LOST_GRADIENT, Evidence(bad_params=tuple(sorted(shares)), lost=shares), recording, outcome
        )

    def _emptied(self, attempt: StepAttempt, recording: TapedStep, names: frozenset[str]) -> Asks:
        """Runs the step with what the loop did to its gradients, which it has made zero itself."""
        edited = recording.with_edits(self.engine.models)
        if edited is None:
            return None
        ours: Ran = yield for_gradients(edited, ReplayChange(), LookDepth.FULL, names)
        return self._divided_away(attempt, edited, ours, names)

    def _divided_away(
        self, attempt: StepAttempt, recording: TapedStep, ours: Ran, names: Iterable[str]
    ) -> CheckFinding | None:
        """Finds that gradients are zero for an infinity that they were divided by, whatever else was lost."""
        lost = [origin.seq for origin in absorbed(ours.rows.graph())]
        if ours.reason or not lost:
            return None
        evidence = Evidence(bad_params=tuple(sorted(names)), ops=tuple(lost))
        return CheckFinding(Trigger.ABSORBED_OVERFLOW, evidence, recording, self.record(attempt, ours))


def _stands_still(ours: Ran, wide: TracedRows) -> bool:
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
