"""Adds to the trace of a healthy step more than its ops' extremes, and estimates from it when to look again."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ampscope.capture.events import StepAttempt
from ampscope.capture.loop_state.held_state import optimizer_state
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.record.terminal import Terminal
from ampscope.capture.step import gradients
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.sharding import local
from ampscope.capture.tracing import light_statistics
from ampscope.capture.tracing.headroom import NearOverflow, SampledRanges
from ampscope.capture.tracing.light_statistics import stored
from ampscope.capture.tracing.sampled_shapes import Shapes
from ampscope.capture.tracing.selection import Rotation
from ampscope.capture.tracing.traced_rows import TraceLayout
from ampscope.capture.tracing.tracer import Tracer
from ampscope.provenance import Graph, is_finite, large_values
from ampscope.provenance.large_values import scaled
from ampscope.trace.files.arrow_arrays import ColumnBlock
from ampscope.trace.schema import EdgeRow, EventKind, Node, OpRow, Phase, SiteRow
from ampscope.trace.vocabulary import NEAR_OVERFLOW, OVERFLOW_AHEAD


class _Alarm(NamedTuple):
    """A place that is told."""

    ahead: NearOverflow
    site: SiteRow


class RangeAlarms:
    """The alarms of a run, one for each place: of one that grows, and of one that is near.

    Args:
        recorder: Takes each down for the time line.
        terminal: Where the first of each sample is told.
    """

    def __init__(self, recorder: Recorder, terminal: Terminal) -> None:
        self._recorder = recorder
        self._terminal = terminal
        self._asked: set[tuple[int, bool]] = set()  # places that were looked into, and whether for growing

    def look(
        self,
        ranges: SampledRanges,
        step: int,
        graph: Callable[[], Graph],
        scale: Callable[[], float | None] = lambda: None,
    ) -> None:
        """A step was sampled.

        Args:
            ranges: With its magnitudes.
            step: Its number.
            graph: Makes the graph of its ops; asked for where there is something new.
            scale: Tells its loss scale, None without one; likewise. It waits for the device.
        """
        new = [each for each in ranges.ahead() if (each.place, each.forecast is not None) not in self._asked]
        if not new:
            return
        ops = graph()
        growing = scaled(ops, scale())
        scales = growing.scale | growing.carrying
        alarms = [alarm for each in new if (alarm := _alarm(each, ranges, ops, scales)) is not None]
        self._asked |= {(each.place, grows) for each in new for grows in {each.forecast is not None, False}}
        for number, alarm in enumerate(alarms):
            text = _in_words(alarm)
            self._recorder.event(EventKind.NOTE, step, text)
            if number == 0:
                others = f", and {len(alarms) - 1} more" if len(alarms) > 1 else ""
                key = hashlib.sha256(f"{alarm.site.op} {alarm.site.module}".encode()).hexdigest()[:8]
                self._terminal.ahead(key, step, text + others)


def _alarm(ahead: NearOverflow, ranges: SampledRanges, ops: Graph, scales: frozenset[int]) -> _Alarm | None:
    """An alarm, unless an overflow there would do no harm, its size is meant, or it is that of the loss scale."""
    here = [seq for seq, rows in ops.outputs.items() if ranges.is_of(rows[0].site, ahead.place)]
    if not here:
        return None
    seq = max(here, key=lambda each: max(map(large_values.magnitude, ops.outputs[each])))
    if (
        seq in scales
        or large_values.cannot_harm(ops, seq)
        or (ahead.forecast is None and large_values.is_meant(ops, seq))
    ):
        return None
    return _Alarm(ahead, ops.site(seq))


def _in_words(alarm: _Alarm) -> str:
    (_, bits, forecast), site = alarm
    outside = "the loss code" if site.phase == Phase.LOSS else "the model itself"
    where = f"{site.op} in {site.module or outside}"
    where = f"{where}, {site.file}:{site.line}" if site.file else where
    dtype = site.out_dtypes[0] if site.out_dtypes else "its dtype"
    if forecast is None:
        return f"{NEAR_OVERFLOW}: {where} gives values that may grow {2**bits:.2f} times until {dtype} overflows"
    when = f"at about step {forecast.step:,} ({forecast.low:,} to {forecast.high:,})"
    return f"{OVERFLOW_AHEAD}: {where} gives values that grow, and {dtype} overflows {when}"


#: Where many steps are traced, the ranges of one in this many are looked at; and of those with every statistic.
LOOK_EVERY = 4


class SampledSteps:
    """Takes every statistic of some tensors of a step as it runs: ops, gradients, optimizer state.

    Args:
        models: The watched models.
        recorder: Where traces go.
        terminal: Where the user is told of what will overflow.

    Attributes:
        steps_left: Until the fastest growing value of the step that was written last overflows; infinite where none
            grows, or nobody looked.
    """

    def __init__(self, models: Models, recorder: Recorder, terminal: Terminal) -> None:
        self._models = models
        self._figures = recorder.figures
        self._selection = recorder.selection
        self._rotation = Rotation(recorder.selection)
        self._ranges = SampledRanges(recorder.sites)
        self._row = recorder.sites.row
        self._alarms = RangeAlarms(recorder, terminal)
        self._looked: dict[str, int] = {}  # by source, the step whose ranges were looked at last
        self._layout: TraceLayout | None = None  # of the traced step before
        self.steps_left = math.inf
        self._chosen: frozenset[str] = frozenset()  # parameters, in the step in progress
        self._noted: set[int] = set()  # of that step, the sequence numbers of what is no op
        self._added_to: frozenset[str] | None = None  # likewise, parameters that had a gradient before its backward
        self._doubtful: dict[int, str] = {}  # their gradients, by sequence number: with what is left of earlier steps

    def begins(self, tracer: Tracer) -> None:
        """A step begins that is one of these."""
        tracer.outputs.shapes = Shapes(self._rotation)
        trained = [name for name, parameter in self._models.parameters.values() if parameter.requires_grad]
        self._chosen, self._noted = frozenset(self._rotation.parameters(trained)), set()
        self._added_to, self._doubtful = None, {}

    def backward_begins(self) -> None:
        """Notes which parameters have a gradient already that a backward is about to add to."""
        if self._added_to is None:
            left = (name for name, parameter in self._models.parameters.values() if parameter.grad is not None)
            self._added_to = frozenset(left)

    def gradients(self, tracer: Tracer) -> None:
        """Adds gradients to the trace as backward left them: with the loss scale in them."""
        for name, parameter in self._models.parameters.values() if tracer.outputs.shapes is not None else ():
            gradient = parameter.grad
            if name in self._chosen and gradient is not None and light_statistics.measurable(stored(local(gradient))):
                if name in (self._added_to or ()):
                    self._doubtful[len(tracer.outputs.ops)] = name
                self._note(tracer, gradient, Node.GRADIENT, name, name.rpartition(".")[0])

    def state(self, tracer: Tracer, optimizer: Optimizer) -> None:
        """Adds optimizer state to the trace, once the optimizer has stepped."""
        if tracer.outputs.shapes is not None:
            for held in optimizer_state(optimizer, self._models):
                if held.owner in self._chosen:
                    self._note(tracer, held.tensor, Node.STATE_AFTER, held.key, held.module)

    def columns(self, tracer: Tracer, attempt: StepAttempt, source: str) -> tuple[ColumnBlock, ColumnBlock]:
        """The rows of a healthy step, and of what it says of the next; waits for the device.

        Args:
            tracer: It has traced the step.
            attempt: The step.
            source: A `Source`.
        """
        ops, edges, self._layout = tracer.columns(attempt.step, source, self._layout)
        seq, low, high = (np.asarray(ops.columns[name]) for name in ("seq", "min", "max"))
        bad = self._among(tracer, seq) & ~(np.isfinite(low) & np.isfinite(high))
        bad |= np.isin(seq, list(self._of_others(attempt)))
        if bad.any():
            left_out = np.isin(edges.columns["seq"], seq[bad])
            ops, edges = ops.where(~bad), edges.where(~left_out)
        self._look(tracer, attempt, source, *(np.asarray(ops.columns[name]) for name in ("site", "min", "max")))
        return self._selection.columns(ops, edges)

    def rows(self, tracer: Tracer, attempt: StepAttempt, source: str) -> tuple[list[OpRow], list[EdgeRow]]:
        """Does as `columns`, row by row."""
        ops, edges = tracer.rows(attempt.step, source)
        low, high = (np.array([math.nan if end is None else end for end in ends], float) for ends in _ends(ops))
        self._look(tracer, attempt, source, np.array([row.site for row in ops], np.int64), low, high)
        others = self._of_others(attempt)
        ops, edges = [row for row in ops if row.seq not in others], [edge for edge in edges if edge.seq not in others]
        return self.without(tracer, ops, edges, finite=True)

    def without(
        self, tracer: Tracer, ops: list[OpRow], edges: list[EdgeRow], *, finite: bool = False
    ) -> tuple[list[OpRow], list[EdgeRow]]:
        """The rows less those of gradients and state; where ``finite``, only less those that are not finite.

        A step that went bad has its gradients marked as it does, and bad state is an incident of its own.
        """
        noted = self._noted if tracer.outputs.shapes is not None else set()
        noted = {row.seq for row in ops if row.seq in noted and not (finite and is_finite(row.min, row.max))}
        return [row for row in ops if row.seq not in noted], [edge for edge in edges if edge.seq not in noted]

    def _of_others(self, attempt: StepAttempt) -> set[int]:
        """Gradients of weights that another optimizer steps, and had not been cleared: they may carry no scale."""
        if not self._doubtful:
            return set()
        own = gradients.trained_by(attempt.optimizer, self._models)
        return {seq for seq, name in self._doubtful.items() if name not in own}

    def _among(self, tracer: Tracer, seq: NDArray[Any]) -> NDArray[np.bool_]:
        return np.isin(seq, list(self._noted if tracer.outputs.shapes is not None else ()))

    def _look(
        self,
        tracer: Tracer,
        attempt: StepAttempt,
        source: str,
        site: NDArray[Any],
        low: NDArray[Any],
        high: NDArray[Any],
    ) -> None:
        self.steps_left, step = math.inf, attempt.step
        is_full = tracer.outputs.shapes is not None
        if is_full or step - self._looked.get(source, -LOOK_EVERY) >= LOOK_EVERY:
            self._looked[source] = step
            outlook = self._ranges.note(step, site, low, high)
            self._figures.headroom_bits = outlook.headroom
            self._alarms.look(
                self._ranges, step, lambda: Graph(*tracer.rows(step, source), self._row), lambda: attempt.scale
            )
            self.steps_left = outlook.steps_left
            if is_full:
                self._rotation.pass_on(len(site), list(outlook.closest))

    def _note(self, tracer: Tracer, tensor: Tensor, node: Node, name: str, module: str) -> None:
        self._noted.add(len(tracer.outputs.ops))
        tracer.sink(tensor, node, name, module, always=True)


def _ends(ops: list[OpRow]) -> tuple[list[float | None], list[float | None]]:
    return [row.min for row in ops], [row.max for row in ops]
