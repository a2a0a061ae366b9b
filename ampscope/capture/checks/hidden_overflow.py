"""Looks at steps in which an overflow was taken for a number: whether what came of it is what float32 has.

Such steps are known from their live trace, so only those are looked at that are traced. A step is run again as it was
and in float32, before its weights move; where the gradients or the loss are others for the overflow, it is an incident.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch

from ampscope.capture.budgets import EARLY_STEPS
from ampscope.capture.changes.replay_change import EverythingIn, ModulesInFloat32, Point, PointsInFloat32, ReplayChange
from ampscope.capture.changes.replay_results import ChangedResult, Regained, ReplayResult
from ampscope.capture.checks import lost_gradients
from ampscope.capture.checks.lost_gradients import Progress
from ampscope.capture.cures.trial_plan import gradient_trial
from ampscope.capture.events import StepAttempt, StepObserver
from ampscope.capture.rerun.step_replay import Again
from ampscope.capture.step import gradients
from ampscope.capture.step.cycle import State, StepCycle
from ampscope.capture.step.incidents import Incidents
from ampscope.capture.step.live_trace import LiveTrace
from ampscope.capture.tape.step_tape import StepTape
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.sharding import local
from ampscope.capture.tracing.light_statistics import finite
from ampscope.capture.tracing.traced_rows import BadFlow, TracedRows
from ampscope.provenance import Graph, Origin, absorbed, hidden, hidden_beside
from ampscope.trace.evidence import Evidence
from ampscope.trace.schema import LOSS_CODE, Phase, ReplayStatus, Trial, Trigger

#: Half precision rounds the gradient of a whole step by a percent or so; what is farther off by this share is wrong.
FAR = 0.1
#: A trial explains what it brings down to this share.
_LEFT = 0.25
#: It explains nothing where no more than this share of the gradients that are off are: single ones heal by chance.
_MOST = 0.5
#: Gradients of a smaller share of the whole gradient's norm are left out: some are nothing but rounding.
_SMALL = 1e-3


class Deviation(NamedTuple):
    """Distances from float32, each as a share of what float32 has."""

    total: float  #: of all gradients as one vector
    loss: float
    of: dict[str, float]  #: of single gradients, by parameter, that are not small beside all of them

    @staticmethod
    def between(ours: Regained, whole: Regained) -> Deviation:
        """Measures how far one run of a step is from another, in float32; waits for the device."""
        apart, sizes = {}, {}
        for name, gradient in whole.gradients.items():
            mine = ours.gradients.get(name)
            if mine is not None and mine.shape == gradient.shape:
                apart[name] = float((local(mine).float() - local(gradient).float()).norm())
                sizes[name] = float(local(gradient).float().norm())
        norm = math.hypot(*sizes.values())
        single = {name: gap / sizes[name] for name, gap in apart.items() if sizes[name] > _SMALL * norm}
        loss = _share(abs((ours.loss or 0.0) - (whole.loss or 0.0)), abs(whole.loss or 0.0))
        return Deviation(_share(math.hypot(*apart.values()), norm), loss, single)

    @property
    def is_large(self) -> bool:
        """Whether anything is farther off than half precision rounds."""
        return max(self.total, self.loss, *self.of.values(), 0.0) > FAR

    @property
    def is_near(self) -> bool:
        """Whether all gradients together, and the loss, are no farther off than that."""
        return max(self.total, self.loss) <= FAR

    def explained(self, left: Deviation) -> frozenset[str]:
        """The parameters whose gradients are off for what is to blame; none where most stay off without it.

        Args:
            left: How far they are off where float32 computes what is to blame, and nothing else.
        """
        off = {name for name, gap in self.of.items() if gap > FAR}
        healed = {name for name in off if left.of.get(name, math.inf) < _LEFT * self.of[name]}
        return frozenset(healed if len(healed) > _MOST * len(off) else ())

    def of_loss(self, left: Deviation) -> bool:
        """Whether the loss is off for it; see `explained`. One number may agree by chance: the gradients have to."""
        return self.loss > FAR and left.loss < _LEFT * self.loss and left.total <= FAR


def _share(gap: float, size: float) -> float:
    return gap / size if size > 0.0 else 0.0


class HiddenOverflow(StepObserver):
    """Looks for overflows that the code itself hid.

    Args:
        again: Runs steps again.
        incidents: Reports what mattered.
        live: The trace of the step in progress.
        tape: What a replay needs.
        cycle: Where the step is.
        progress: Tells a training that has come to its end, whose gradients are rounding.
        guard: Catches faults of looking.
    """

    def __init__(
        self,
        again: Again,
        incidents: Incidents,
        live: LiveTrace,
        tape: StepTape,
        cycle: StepCycle,
        progress: Progress,
        guard: Guard,
    ) -> None:
        self.guard = guard
        self._progress = progress
        self._again = again
        self._incidents = incidents
        self._live = live
        self._tape = tape
        self._cycle = cycle
        self._looked: dict[tuple[int, int], int] = {}  # sites of an overflow and of what hid it: the latest look
        self._flow: BadFlow | None = None  # of the step whose graph was walked last,
        self._places: set[tuple[int, int]] = set()  # and the sites that it told

    def optimizer_steps(self, attempt: StepAttempt) -> None:
        """Looks, if the step was traced and something in it was not finite."""
        flow = None if attempt.bad or self._tape.guard.broken else self._live.bad_flow()
        if flow is None or (flow == self._flow and not self._are_due(self._places, attempt.step)):
            return
        graph = self._live.graph()
        divided = absorbed(graph)  # told by the trace itself, once the step is over
        places = {_places(graph, each) for each in divided or hidden(graph)}
        self._flow, self._places = flow, places
        if not self._are_due(places, attempt.step) or not self._again.budget.allows_look(
            whatever_it_costs=not self._looked
        ):
            return
        recording = self._tape.recording()._replace(scale=attempt.scale)
        self._looked |= dict.fromkeys(places, attempt.step)
        if recording.has_received():  # what others would have sent in float32 cannot be known
            return
        with self._cycle.inside(State.JUDGING):
            started = time.perf_counter()
            if divided:
                whole = self._again.run(recording, EverythingIn(torch.float32))
                self._record_trials(attempt, recording, whole, _change(graph, divided, conversions=False))
            else:
                self._look(attempt, recording, self._progress.note(attempt))
            attempt.judging_s += time.perf_counter() - started

    def _are_due(self, places: set[tuple[int, int]], step: int) -> bool:
        """Whether one of these places was not looked at lately."""
        return any(step - self._looked.get(each, -EARLY_STEPS) >= EARLY_STEPS for each in places)

    def _look(self, attempt: StepAttempt, recording: TapedStep, loss: float) -> None:
        names = gradients.names(attempt.optimizer, self._again.models)
        ours, rows = self._again.traced(recording, ReplayChange(), names)
        edited = recording.with_edits(self._again.models) if not ours.reason and not _is_finite(ours) else None
        if edited is not None:  # the loop hid it in the gradients themselves
            recording = edited
            ours, rows = self._again.traced(recording, ReplayChange(), names)
        if ours.reason or not _is_finite(ours):
            return
        wide, rows_wide = self._again.traced(recording, EverythingIn(torch.float32), names)
        if not wide.reason and not self._progress.has_ended(lost_gradients.total_norm(wide.gradients), loss):
            self.tell(attempt, recording, (ours, rows), (wide, rows_wide))

    def tell(
        self,
        attempt: StepAttempt,
        recording: TapedStep,
        half: tuple[Regained, TracedRows],
        wide: tuple[Regained, TracedRows],
    ) -> bool:
        """Reports an overflow of a step that was hidden, if there is one and it matters.

        Args:
            attempt: The attempt.
            recording: The step.
            half: What a faithful replay came to.
            wide: What everything in float32 came to.

        Returns:
            Whether there was.
        """
        (ours, rows), (whole, rows_wide) = half, wide
        if whole.reason or not _is_finite(whole):
            return False
        found = hidden_beside(rows.graph(), rows_wide.graph())
        apart = Deviation.between(ours, whole) if found else None
        if apart is None or not apart.is_large:
            return False
        healed = self._again.run(recording, PointsInFloat32(_points(rows.graph(), found)))
        left = Deviation.between(healed, whole)
        names = apart.explained(left)
        if healed.reason or not (names or apart.of_loss(left)):  # else half precision rounds so far, elsewhere
            return False
        self._again.record(attempt, rows, rows_wide)
        self._record_trials(attempt, recording, whole, _change(rows.graph(), found, conversions=True))
        status = ReplayStatus.DIVERGED if ours.differences else ReplayStatus.EXACT
        outcome = ReplayResult(status, "; ".join(ours.differences), ours.seconds)
        evidence = Evidence(
            bad_params=tuple(sorted(names)),
            ops=tuple(each.seq for each in found),
            hidden=tuple((each.seq, each.sink) for each in found),
            gradients_apart=apart.total,
            loss_apart=apart.loss,
        )
        self._incidents.report(attempt, Trigger.ABSORBED_OVERFLOW, outcome, evidence)
        return True

    def _record_trials(
        self, attempt: StepAttempt, recording: TapedStep, whole: Regained, change: ReplayChange | None
    ) -> None:
        """Writes what everything in float32 came to, and tries the modules alone that a cure can name."""
        runs: list[tuple[ReplayChange, Regained]] = [(EverythingIn(torch.float32), whole)]
        if change is not None:
            runs.append((change, self._again.run(recording, change)))
        for each, found in runs:
            agrees = Deviation.between(found, whole).is_near
            outcome = Trial.UNAVAILABLE if found.reason else Trial.FINITE if agrees else Trial.NONFINITE
            result = ChangedResult(outcome, found.reason, found.loss, found.seconds)
            made = gradient_trial(each, recording.scale, result)
            self._again.recorder.trial(made, step=attempt.step, optimizer=attempt.index)


def _places(graph: Graph, origin: Origin) -> tuple[int, int]:
    return graph.outputs[origin.seq][0].site, graph.outputs[origin.sink][0].site


def _is_finite(found: Regained) -> bool:
    """Whether losses and gradients are, as far as they are known."""
    loss = found.loss is None or math.isfinite(found.loss)
    return loss and all(map(finite, found.gradients.values()))


def _points(graph: Graph, found: list[Origin]) -> frozenset[Point]:
    """Returns the points where values overflowed, and all on the way to where that was hidden."""
    sites = [graph.site(seq) for origin in found for seq in origin.path]
    return frozenset(Point(site.module, site.file, site.line) for site in sites)


def _change(graph: Graph, found: list[Origin], *, conversions: bool) -> ReplayChange | None:
    """Float32 where values overflowed and where that was hidden; None where that is the whole model.

    Args:
        graph: The step's records.
        found: The overflows, each with the way to what hid it.
        conversions: Also where the code, anywhere, asks for a half dtype by name.
    """
    sites = [graph.site(seq) for origin in found for seq in origin.path]
    modules = {LOSS_CODE if site.phase == Phase.LOSS and not site.module else site.module for site in sites}
    return None if "" in modules else ModulesInFloat32(tuple(sorted(modules)), conversions=conversions)
