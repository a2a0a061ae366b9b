"""Looks at steps in which an overflow was taken for a number: whether what came of it is what float32 has.

Such steps are known from their live trace, so only those are looked at that are traced. A step is run again as it was
and in float32, before its weights move; where the gradients or the loss are others for the overflow, it is an incident.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ampscope.capture.budgets import EARLY_STEPS
from ampscope.capture.changes.replay_change import EverythingIn, ModulesInFloat32, Point, PointsInFloat32, ReplayChange
from ampscope.capture.checks import lost_gradients
from ampscope.capture.checks.check import Asks, Check, CheckContext, CheckFinding
from ampscope.capture.checks.lost_gradients import Progress
from ampscope.capture.events import StepAttempt
from ampscope.capture.rerun.engine import LookDepth, Ran, for_gradients
from ampscope.capture.step import gradients
from ampscope.capture.step.live_trace import LiveTrace
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support.sharding import local
from ampscope.capture.tracing.light_statistics import finite
from ampscope.capture.tracing.traced_rows import BadFlow
from ampscope.provenance import Graph, Origin, absorbed, hidden, hidden_beside
from ampscope.trace.evidence import Evidence
from ampscope.trace.schema import LOSS_CODE, Phase, Trigger

#: Half precision rounds the gradient of a whole step by a percent or so; what is farther off by this share is wrong.
FAR = 0.1
#: A loss alone that is no farther off than this is the same.
_CLOSE = 0.01
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
    def between(ours: Ran, whole: Ran) -> Deviation:
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
        """Whether the loss is off for it; see `explained`.

        One number may agree by chance: the gradients have to, or, where they are too large for the loss scale once the
        loss is right, it has to agree closely.
        """
        agrees = left.total <= FAR if math.isfinite(left.total) else left.loss <= _CLOSE
        return self.loss > FAR and left.loss < _LEFT * self.loss and agrees


def _share(gap: float, size: float) -> float:
    return gap / size if size > 0.0 else 0.0


class HiddenOverflow(Check):
    """Looks for overflows that the code itself hid.

    Args:
        context: What it needs of its run.
        live: The trace of the step in progress.
        progress: Tells a training that has come to its end, whose gradients are rounding.
    """

    free_looks = 1

    def __init__(self, context: CheckContext, live: LiveTrace, progress: Progress) -> None:
        super().__init__(context)
        self._live = live
        self._progress = progress
        self._looked: dict[tuple[int, int], int] = {}  # sites of an overflow and of what hid it: the latest look
        self._flow: BadFlow | None = None  # of the step whose graph was walked last,
        self._places: set[tuple[int, int]] = set()  # and the sites that it told

    def due(self, attempt: StepAttempt) -> Asks | None:
        """Whether the step was traced and something in it was not finite that was not looked at lately."""
        flow = self._live.bad_flow()
        if flow is None or (flow == self._flow and not self._are_due(self._places, attempt.step)):
            return None
        graph = self._live.graph()
        divided = absorbed(graph)  # told by the trace itself, once the step is over
        places = {_places(graph, each) for each in divided or hidden(graph)}
        self._flow, self._places = flow, places
        return self._asks(attempt, graph, divided) if self._are_due(places, attempt.step) else None

    def _are_due(self, places: set[tuple[int, int]], step: int) -> bool:
        """Whether one of these places was not looked at lately."""
        return any(step - self._looked.get(each, -EARLY_STEPS) >= EARLY_STEPS for each in places)

    def _asks(self, attempt: StepAttempt, graph: Graph, divided: list[Origin]) -> Asks:
        recording = self.tape.recording()._replace(scale=attempt.scale)
        self._looked |= dict.fromkeys(self._places, attempt.step)
        if recording.has_received():  # what others would have sent in float32 cannot be known
            return None
        if divided:
            whole: Ran = yield for_gradients(recording, EverythingIn(torch.float32))
            yield from self._trials(attempt, recording, whole, _change(graph, divided, conversions=False))
            return None
        loss = self._progress.note(attempt)
        names = gradients.names(attempt.optimizer, self.engine.models)
        ours: Ran = yield for_gradients(recording, ReplayChange(), LookDepth.FULL, names)
        edited = recording.with_edits(self.engine.models) if not ours.reason and not _is_finite(ours) else None
        if edited is not None:  # the loop hid it in the gradients themselves
            recording = edited
            ours = yield for_gradients(recording, ReplayChange(), LookDepth.FULL, names)
        if ours.reason or not _is_finite(ours):
            return None
        wide: Ran = yield for_gradients(recording, EverythingIn(torch.float32), LookDepth.FULL, names)
        if wide.reason or self._progress.has_ended(lost_gradients.total_norm(wide.gradients), loss):
            return None
        return (yield from self.told(attempt, recording, ours, wide))

    def told(self, attempt: StepAttempt, recording: TapedStep, ours: Ran, wide: Ran) -> Asks:
        """Asks whether an overflow of a step was hidden, and matters.

        Args:
            attempt: The attempt.
            recording: The step.
            ours: What a faithful replay came to, with every statistic.
            wide: What everything in float32 came to, likewise.
        """
        if wide.reason or not _is_finite(wide):
            return None
        graph = ours.rows.graph()
        found = hidden_beside(graph, wide.rows.graph())
        apart = Deviation.between(ours, wide) if found else None
        if apart is None or not apart.is_large:
            return None
        healed: Ran = yield for_gradients(recording, PointsInFloat32(_points(graph, found)))
        left = Deviation.between(healed, wide)
        names = apart.explained(left)
        if healed.reason or not (names or apart.of_loss(left)):  # else half precision rounds so far, elsewhere
            return None
        outcome = self.record(attempt, ours, wide)
        yield from self._trials(attempt, recording, wide, _change(graph, found, conversions=True))
        evidence = Evidence(
            bad_params=tuple(sorted(names)),
            ops=tuple(each.seq for each in found),
            hidden=tuple((each.seq, each.sink) for each in found),
            gradients_apart=apart.total,
            loss_apart=apart.loss,
        )
        return CheckFinding(Trigger.ABSORBED_OVERFLOW, evidence, recording, outcome)

    def _trials(self, attempt: StepAttempt, recording: TapedStep, whole: Ran, change: ReplayChange | None) -> Asks:
        """Writes what everything in float32 came to, and tries the modules alone that a cure can name."""
        runs: list[tuple[ReplayChange, Ran]] = [(EverythingIn(torch.float32), whole)]
        if change is not None:
            runs.append((change, (yield for_gradients(recording, change))))
        for each, found in runs:
            agrees = Deviation.between(found, whole).is_near
            self.tried(attempt, recording, each, found.result_if(cured=agrees))
        return None


def _places(graph: Graph, origin: Origin) -> tuple[int, int]:
    return graph.outputs[origin.seq][0].site, graph.outputs[origin.sink][0].site


def _is_finite(found: Ran) -> bool:
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
