"""Tells of writes between two steps that left a carried tensor inf or NaN: the op, its line and its step."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ampscope import provenance
from ampscope.capture.events.open_step import StepAttempt
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.replay.results import ReplayResult
from ampscope.capture.replay.tape.entry import EarlierResult
from ampscope.capture.step.carried.closeup import Closeups, Names, source_line
from ampscope.capture.step.carried.gap import Gap
from ampscope.capture.step.carried.loop_position import Position, is_above
from ampscope.capture.step.carried.still_carried import StillCarried
from ampscope.capture.torch_support.guard import Guard, Suppressed
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.readback import Parcel
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.trace.schema import ENTRY_NODES, ReplayStatus, Trigger

#: Writes that are run again in one run: a tensor that goes bad again and again has been explained by then.
MOST_CLOSEUPS = 24


@dataclass(slots=True)
class _Look:
    """Carried tensors that the loop wrote between two steps, on the way to be known as finite or not."""

    parcel: Parcel
    sources: dict[str, EarlierResult]
    names: Names
    gap: Gap
    before: tuple[int, int]  #: step and optimizer of the attempt before
    forward: Position  #: where the first forward after it stands


@dataclass(slots=True)
class _Write:
    """A write that left a carried tensor not finite, until it is known whether the step that comes reads that."""

    after: tuple[int, int]  #: step and optimizer that it counts for
    names: list[str]
    outcome: ReplayResult
    rows: TracedRows | None
    details: dict[str, Any] = field(default_factory=dict)
    is_absorbed: bool = False  #: the calls between the steps made numbers of an infinity: something over it is zero


class WrittenBetween:
    """Looks at what was written between steps, and runs the calls again that left something not finite.

    Args:
        models: The watched models.
        recorder: Where rows go.
        guard: Catches faults in it.
    """

    def __init__(self, models: Models, recorder: Recorder, guard: Guard) -> None:
        self._recorder = recorder
        self._closeups = Closeups(models, recorder, guard)
        self._still = StillCarried(self._closeups)
        self._before = (-1, 0)
        self._look: _Look | None = None
        self._known: dict[str, bool] = {}  # name -> finite, at the last look
        self._fed: set[str] = set()
        self._born: set[str] = set()
        self._untold: list[_Write] = []
        self._examined = 0

    def after(self, attempt: StepAttempt) -> None:
        """An attempt is over."""
        self._before = attempt.step, attempt.index

    def look(
        self,
        gap: Gap,
        found: dict[str, tuple[Tensor, EarlierResult]],
        largest: list[Tensor | None],
        forward: Position,
    ) -> None:
        """Sends for what the carried tensors hold.

        Args:
            gap: The calls that wrote them.
            found: The tensors by name, with the results of the gap that they are.
            largest: The largest magnitude of each.
            forward: Where the loop's next forward stands.
        """
        parcel = Parcel(dict(zip(found, largest, strict=True)))
        sources = {name: source for name, (_, source) in found.items()}
        names = self._closeups.names(gap)
        self._still.look(gap, names, self._before)
        self._look = _Look(parcel, sources, names, gap, self._before, forward)

    def arrived(self, *, wait: bool = False) -> dict[str, bool]:
        """Whether each tensor that was looked at is finite, once the host knows; runs again what left one bad."""
        look = self._look
        if look is None or not (wait or look.parcel.arrived):
            return {}
        self._look = None
        known = {name: value is None or math.isfinite(value) for name, value in look.parcel.values().items()}
        turned = [name for name, finite in known.items() if not finite and self._known.get(name, True)]
        self._known.update(known)
        self._fed -= {name for name, finite in known.items() if finite}
        by_step: dict[int, list[str]] = {}
        for name in turned:
            number = look.sources[name].entry
            after = is_above(look.gap.positions[number], look.forward)
            by_step.setdefault(look.before[0] + after, []).append(name)
        for step, names in by_step.items():
            self._examine(look, step, names)
        return known

    def _examine(self, look: _Look, step: int, names: list[str]) -> None:
        self._examined += 1
        if self._examined > MOST_CLOSEUPS:
            return
        started = time.perf_counter()
        after = step, look.before[1]
        outcome, rows, is_absorbed = ReplayResult(ReplayStatus.EXACT), None, False
        with Suppressed() as suppressed:
            rows = self._closeups.traced(look.gap, look.names, [(name, look.sources[name]) for name in names], after)
        if rows is not None:
            graph = provenance.Graph(rows.ops, rows.edges, self._recorder.sites.row)
            if not _is_born(graph):
                self._fed.update(names)
                return
            self._born.update(names)
            is_absorbed = bool(provenance.absorbed(graph))
        else:
            outcome = ReplayResult(ReplayStatus.UNAVAILABLE, str(suppressed.error)[:200])
        outcome.seconds = time.perf_counter() - started
        details = {"carried": names, "source": source_line(look.gap, look.sources[names[0]].entry)}
        self._untold.append(_Write(after, names, outcome, rows, details, is_absorbed))

    def is_born(self, name: str) -> bool:
        """Whether what is not finite in a tensor was made by the calls between steps, as far as that is known."""
        return name in self._born

    def is_fed(self, name: str) -> bool:
        """Whether a tensor only hands on what comes from outside, as a buffer for batches does."""
        return name in self._fed

    def hold(self, attempt: StepAttempt, names: list[str]) -> None:
        """A step has left these not finite, its replay is traced, and nothing of it has suffered yet."""
        details = {"carried": names, "read": False}
        after = attempt.step, attempt.index
        self._untold.append(_Write(after, names, ReplayResult(ReplayStatus.EXACT), None, details))

    def read(self, names: set[str]) -> None:
        """The step in progress reads what comes from these tensors: what was made of an infinity matters now."""
        for write in [each for each in self._untold if each.is_absorbed and not names.isdisjoint(each.names)]:
            write.details["read"] = True
            self._tell(write)

    def failed(self, names: set[str]) -> None:
        """A step that reads these has gone wrong."""
        for write in [each for each in self._untold if not names.isdisjoint(each.names)]:
            self._tell(write)

    def _tell(self, write: _Write) -> None:
        self._untold.remove(write)
        self._closeups.record(Trigger.NONFINITE_CARRIED, write.after, write.rows, write.outcome, write.details)


def _is_born(graph: provenance.Graph) -> bool:
    """Whether calls made what is not finite themselves, and did not only hand on what they were given."""
    return any(not _is_given(graph, origin.seq) for origin in provenance.origins(graph))


def _is_given(graph: provenance.Graph, seq: int) -> bool:
    """Whether an op hands on an infinity or NaN from outside, or one that stands in the loop's code."""
    numbers = {str(value).lstrip("-") for value in graph.scalars(seq).values()}
    return graph.site(seq).op in ENTRY_NODES or not numbers.isdisjoint(("inf", "nan"))
