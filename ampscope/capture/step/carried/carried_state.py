"""Follows what a loop carries from step to step: who wrote it last, and the first step at which it was not finite."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from ampscope.capture.events.calls import StepStart
from ampscope.capture.events.observer import StepObserver
from ampscope.capture.events.open_step import EndedStep, StepAttempt
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.replay.step_tape import StepTape
from ampscope.capture.replay.tape.entry import EarlierResult, Entry, EntryKind
from ampscope.capture.replay.tape.taped_step import TapedStep
from ampscope.capture.step.carried import loop_position
from ampscope.capture.step.carried.carried_tensors import Carried, Round, buffer_name, role_of
from ampscope.capture.step.carried.gap import Gap
from ampscope.capture.step.carried.loop_mode import LoopMode
from ampscope.capture.step.carried.passing import Passing
from ampscope.capture.step.carried.written_between import WrittenBetween
from ampscope.capture.step.measures.state.held import largest_within
from ampscope.capture.torch_support import dynamo, tensor_tree
from ampscope.capture.torch_support.calls import call_state
from ampscope.capture.torch_support.calls.pause import Pause
from ampscope.capture.torch_support.communication.sharded_models import obstacle_to_replay
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.readback import Parcel
from ampscope.capture.tracing.distinct.casts_before import CastsBefore
from ampscope.capture.tracing.statistics import stats
from ampscope.trace.schema import Trigger

#: The first steps, in which is learned whether the loop carries anything; learned again around powers of two.
LEARNED_STEPS = 3
#: Steps after which a loop is no longer listened to between them, where none has read what it carries.
PATIENCE = 32
#: Steps after one that went wrong for which the loop is listened to between them, too.
ALERT_STEPS = 8


class CarriedState(StepObserver):
    """The tensors that a loop carries; many methods because it hears of steps and of what runs between.

    Many attributes because what is known of the gap, of the step and of the run ends at different times.
    A loop that carries nothing is listened to between its first steps only.

    Args:
        models: The watched models.
        tape: The tape of the step in progress.
        recorder: Where rows go.
        casts: Is told of casts between the first steps.
        pause: On while AMPscope's own code computes.
        guard: Catches faults of following them.

    Attributes:
        mode: Listens between steps.
    """

    def __init__(
        self, models: Models, tape: StepTape, recorder: Recorder, casts: CastsBefore, pause: Pause, guard: Guard
    ) -> None:
        self.guard = guard
        self._casts = casts
        self._tape = tape
        self._between = WrittenBetween(models, recorder, guard)
        self.mode = LoopMode(self, pause)
        self._carried = Carried(partial(buffer_name, models))
        self._models = models
        self._obstacle = (-1, "")  # to following, as of that revision of the models
        self._gap: Gap | None = None
        self._gap_before: tuple[Gap, loop_position.Position] | None = None  # and where the step after it began
        self._passing = Passing()
        self._alert = 0  # steps for which it goes on
        self._idle = 0  # steps since one read what the loop carries
        self._start = 0  # of the present step, on the tape
        self._learning = True
        self._finite: set[str] = set()  # names of those that were seen to be
        self._bad: dict[str, bool] = {}  # name -> whether it was told that a step has read it
        self._derived: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # what the gap made of something bad
        self._names: dict[int, str] = {}  # of what the present step reads, by ``id``
        self._left: tuple[tuple[str, EarlierResult], ...] = ()  # by the present step, not finite
        self._read: list[str] = []  # by the present step though not finite, for the first time

    @property
    def _follows(self) -> bool:
        return self._learning or self._alert > 0 or (bool(self._carried) and self._idle < PATIENCE)

    # -- between two steps --------------------------------------------------------------------------------------

    def step_ended(self, ended: EndedStep) -> None:
        """What follows until the next forward is between two steps; a mode would be compiled into the loop's code."""
        number = ended.number + 1
        self._alert = ALERT_STEPS if ended.attempt.bad else max(self._alert - 1, 0)
        self._gap_before = None
        self._learning = number <= LEARNED_STEPS or not number & (number - 1) or not (number - 1) & (number - 2)
        self._between.after(ended.attempt)
        if self._follows and self._gap is None and not dynamo.in_use() and not self._found_obstacle():
            self._gap = Gap(call_state.device_types())
            self.mode.insert()

    def _found_obstacle(self) -> str:
        """Why nothing is followed: wrappers give the memory of weights back, and none of it is to be read."""
        if self._obstacle[0] != self._models.revision:
            modules = itertools.chain(self._models.roots, self._models.modules)
            self._obstacle = self._models.revision, obstacle_to_replay(modules)
        return self._obstacle[1]

    def before_write(self, func: Callable[..., Any], args: Any, kwargs: Any) -> dict[int, Tensor]:
        """See `loop_mode.CallKeeper`."""
        return self._gap.before_write(func, args, kwargs) if self._gap is not None else {}

    def called(
        self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any, originals: dict[int, Tensor]
    ) -> bool:
        """See `loop_mode.CallKeeper`."""
        gap = self._gap
        if self._learning:
            self._casts.called(func, args, kwargs, result)
        entry = gap.called(func, args, kwargs, result, originals) if gap is not None else None
        if gap is None or entry is None:
            return gap is not None
        for tensor in tensor_tree.tensors((args, kwargs)):
            self._carried.read(Round.GAP, tensor)
            name = self._carried.name(tensor)
            if name:
                gap.names[id(tensor)] = name
        if entry.in_place:
            for tensor in tensor_tree.tensors(kwargs.get("out", args[0] if args else None)):
                self._carried.wrote(tensor)
            return not gap.full
        for leaf, tensor in enumerate(tensor_tree.tensors(result)):
            self._carried.made(Round.GAP, tensor, role_of(entry, leaf))
        return not gap.full

    def step_began(self, start: StepStart) -> None:
        """Looks at what was written between the steps."""
        self.mode.remove()
        gap, self._gap = self._gap, None
        self._left, self._read, self._names = (), [], {}
        self._start = self._tape.calls.end
        self._turned(self._between.arrived(), self._between.is_born)
        self._derived = {}
        if gap is None:
            return
        self._carried.round_ended(Round.GAP)
        found = {name: (tensor, source) for tensor, source in gap.results() if (name := self._carried.name(tensor))}
        if self._learning:  # a cache may be read for the first time much later
            found |= self._passing.name_those(gap, self._is_passing, self._between.is_born)
        here = loop_position.here()
        self._between.look(gap, found, largest_within([tensor for tensor, _ in found.values()]), here)
        self._gap_before = gap, here
        self._turned(self._between.arrived(), self._between.is_born)
        self._follow_bad(gap)

    def _is_passing(self, tensor: Tensor) -> bool:
        return not tensor.requires_grad and not self._carried.name(tensor)

    def suffered(self) -> None:
        """The step in progress has gone wrong: looks at what it read of the calls before it; waits for the device."""
        if self._gap_before is None:
            return
        gap, forward = self._gap_before
        self._gap_before = None
        read = {reference.identity for entry in self._entries() for reference in entry.arguments.outside}

        def is_bad(tensor: Tensor) -> bool:
            return id(tensor) in read and self._is_passing(tensor) and not stats.finite(tensor)

        found = self._passing.name_those(gap, is_bad, self._between.is_born)
        if found:
            self._between.look(gap, found, largest_within([tensor for tensor, _ in found.values()]), forward)
            self._between.arrived(wait=True)
        for name, (tensor, _) in found.items():
            if self._between.is_born(name):
                self._names[id(tensor)] = name

    def _turned(self, looks: dict[str, bool], born: Callable[[str], bool]) -> None:
        """Learns which carried tensors are finite and which are not any more.

        Args:
            looks: Whether each is finite.
            born: Whether the loop is known to have made what is not finite in one.
        """
        for name, finite in looks.items():
            if name in self._passing:
                continue
            if finite:
                self._finite.add(name)
                self._bad.pop(name, None)
            elif born(name) or name in self._finite:
                self._bad.setdefault(name, False)

    def _follow_bad(self, gap: Gap) -> None:
        """Notes what the calls between two steps made of something that is not finite."""
        for name in self._bad:
            for tensor in gap.made_of(lambda each, name=name: self._carried.name(each) == name):  # type: ignore[misc]  # bound now
                self._derived[id(tensor)] = weakref.ref(tensor), name

    # -- in a step ----------------------------------------------------------------------------------------------

    def attempt_began(self, attempt: StepAttempt) -> None:
        """Notes which carried tensors the step has read, and looks at those that it has made or written."""
        if not self._follows:
            return
        self._carried.round_ended(Round.STEP)
        self._note_reads()
        self._idle = 0 if self._names or self._is_of_use() else self._idle + 1
        found: dict[str, tuple[Tensor, EarlierResult]] = {}
        for tensor, source in self._tape.calls.results.alive():
            entry = self._tape.calls[source.entry]
            if entry.kind is EntryKind.BACKWARD or tensor.requires_grad:
                continue
            if entry.in_place:
                self._carried.wrote(tensor)
            else:
                self._carried.made(Round.STEP, tensor, role_of(entry, source.leaf))
            name = self._carried.name(tensor)
            if name:
                found[name] = tensor, source
        values = Parcel(dict(zip(found, largest_within([tensor for tensor, _ in found.values()]), strict=True)))
        if values.arrived:
            known = {name: value is None or math.isfinite(value) for name, value in values.values().items()}
            new = [name for name, good in known.items() if not good and name in self._finite and name not in self._bad]
            self._left = tuple((name, found[name][1]) for name in new)
            self._turned(known, lambda _: False)

    def _entries(self) -> Iterator[Entry]:
        """The calls of the step in progress."""
        calls = self._tape.calls
        return (calls[number] for number in range(max(self._start, calls.start), calls.end))

    def _note_reads(self) -> None:
        alive = {id(tensor): tensor for tensor, _ in self._tape.calls.results.alive()}
        results = self._tape.calls.results.alive()
        before = {(source.entry, source.leaf): tensor for tensor, source in results if source.entry < self._start}
        for entry in self._entries():
            for source in entry.arguments.earlier:
                made = before.get((source.entry, source.leaf))
                if made is not None:  # by the step before, which the tape has not forgotten
                    self._carried.read(Round.STEP, made)
            for reference in entry.arguments.outside:
                tensor = reference.tensor if id(reference.tensor) == reference.identity else None
                self._note_read(reference.identity, tensor if tensor is not None else alive.get(reference.identity))
        self._bad.update(dict.fromkeys(self._read, True))
        self._between.read({*self._names.values()})

    def _note_read(self, identity: int, tensor: Tensor | None) -> None:
        """The step has read a tensor that it has not made, which may be gone."""
        if tensor is not None:
            self._carried.read(Round.STEP, tensor)
        name = self._carried.name(tensor) if tensor is not None else self._carried.name_by_id(identity)
        if self._bad.get(name) is False:
            self._read.append(name)
        passing = self._passing.name_by_id(identity)
        name = self._derived_from(identity) or name or (passing if self._between.is_born(passing) else "")
        if name and not self._between.is_fed(name):
            self._names[identity] = name

    def _is_of_use(self) -> bool:
        """Whether the step may read what was made, between the steps, of what the loop carries; asked now and then."""
        if self._gap_before is None or self._idle % 8 != 7:
            return False
        made = {id(tensor) for tensor in self._gap_before[0].made_of(lambda each: bool(self._carried.name(each)))}
        read = {reference.identity for entry in self._entries() for reference in entry.arguments.outside}
        return not made.isdisjoint(read | self._models.parameters.keys())

    def _derived_from(self, identity: int) -> str:
        """The name of the tensor, not finite, that the loop made another of between the steps."""
        tensor, name = self._derived.get(identity, (lambda: None, ""))
        return name if tensor() is not None else ""

    def turned_bad(self) -> Trigger | None:
        """What the state that the step has left, or found, gives cause to look at; told once."""
        if self._left:
            return Trigger.NONFINITE_CARRIED
        read, self._read = self._read, []
        return Trigger.CARRIED_READ if read else None

    def completed(self, recording: TapedStep) -> TapedStep:
        """What it takes to run a step again, with what is known of the carried tensors in it."""
        return recording._replace(carried=self._names, left=self._left)

    def judged(self, attempt: StepAttempt) -> None:
        """A step was looked at; if it went wrong, who wrote what it had read is told, too."""
        if attempt.bad:
            self._between.failed(set(self._names.values()))
        elif self._left:
            self._between.hold(attempt, [name for name, _ in self._left])
        self._left = ()

    def abandoned(self, reason: str) -> None:
        """Stops listening."""
        self.mode.remove()
        self._gap = None
