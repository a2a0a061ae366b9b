"""Follows what a loop carries from step to step: who wrote it last, and the first step at which it was not finite."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.events.calls import StepStart
from ampscope.capture.events.observer import StepObserver
from ampscope.capture.events.open_step import EndedStep, StepAttempt
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.replay.step_tape import StepTape
from ampscope.capture.replay.tape.entry import EarlierResult, EntryKind
from ampscope.capture.replay.tape.taped_step import TapedStep
from ampscope.capture.step.carried import loop_position
from ampscope.capture.step.carried.carried_tensors import Carried, Round, role_of
from ampscope.capture.step.carried.gap import Gap
from ampscope.capture.step.carried.loop_mode import LoopMode
from ampscope.capture.step.carried.written_between import WrittenBetween
from ampscope.capture.torch_support import dynamo, tensor_tree
from ampscope.capture.torch_support.calls import call_state
from ampscope.capture.torch_support.calls.pause import Pause
from ampscope.capture.torch_support.communication.sharded_models import obstacle_to_replay
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.readback import Parcel
from ampscope.capture.tracing.statistics import stats
from ampscope.trace.schema import Trigger

#: The first steps, in which is learned whether the loop carries anything; learned again around powers of two.
LEARNED_STEPS = 3
#: Elements that are looked at each step, in all.
MOST_LOOKED_AT = 1 << 22


class CarriedState(StepObserver):
    """The tensors that a loop carries; many methods because it hears of steps and of what runs between them.

    A loop that carries nothing is listened to between its first steps only.

    Args:
        models: The watched models.
        tape: The tape of the step in progress.
        recorder: Where rows go.
        pause: On while AMPscope's own code computes.
        guard: Catches faults of following them.

    Attributes:
        mode: Listens between steps.
    """

    def __init__(self, models: Models, tape: StepTape, recorder: Recorder, pause: Pause, guard: Guard) -> None:
        self.guard = guard
        self._tape = tape
        self._between = WrittenBetween(models, recorder, guard)
        self.mode = LoopMode(self, pause)
        self._types = call_state.device_types()
        self._carried = Carried(partial(_buffer_name, models))
        self._obstacle = partial(_obstacle, models)
        self._gap: Gap | None = None
        self._learning = True
        self._finite: set[str] = set()  # names of those that were seen to be
        self._bad: dict[str, bool] = {}  # name -> whether it was told that a step has read it
        self._derived: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # what the gap made of something bad
        self._names: dict[int, str] = {}  # of what the present step reads, by ``id``
        self._left: tuple[tuple[str, EarlierResult], ...] = ()  # by the present step, not finite
        self._read: list[str] = []  # by the present step though not finite, for the first time

    @property
    def _follows(self) -> bool:
        return self._learning or bool(self._carried)

    # -- between two steps --------------------------------------------------------------------------------------

    def step_ended(self, ended: EndedStep) -> None:
        """What follows until the next forward is between two steps; a mode would be compiled into the loop's code."""
        number = ended.number + 1
        self._learning = number <= LEARNED_STEPS or not number & (number - 1) or not (number - 1) & (number - 2)
        self._between.after(ended.attempt)
        if self._follows and self._gap is None and not dynamo.in_use() and not self._obstacle():
            self._gap = Gap(self._types)
            self.mode.insert()

    def before_write(self, func: Callable[..., Any], args: Any, kwargs: Any) -> dict[int, Tensor]:
        """See `loop_mode.CallKeeper`."""
        return self._gap.before_write(func, args, kwargs) if self._gap is not None else {}

    def called(
        self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any, originals: dict[int, Tensor]
    ) -> bool:
        """See `loop_mode.CallKeeper`."""
        gap = self._gap
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
        self._turned(self._between.arrived(), self._between.is_born)
        self._derived = {}
        if gap is None:
            return
        self._carried.round_ended(Round.GAP)
        found = {name: (tensor, source) for tensor, source in gap.results() if (name := self._carried.name(tensor))}
        self._between.look(gap, found, largest(tensor for tensor, _ in found.values()), loop_position.here())
        self._turned(self._between.arrived(), self._between.is_born)
        self._follow_bad(gap)

    def _turned(self, looks: dict[str, bool], born: Callable[[str], bool]) -> None:
        """Learns which carried tensors are finite and which are not any more.

        Args:
            looks: Whether each is finite.
            born: Whether the loop is known to have made what is not finite in one.
        """
        for name, finite in looks.items():
            if finite:
                self._finite.add(name)
                self._bad.pop(name, None)
            elif born(name) or name in self._finite:
                self._bad.setdefault(name, False)

    def _follow_bad(self, gap: Gap) -> None:
        """Notes what the calls between two steps made of something that is not finite."""
        if not self._bad:
            return
        for name in self._bad:
            sources = {source.entry for tensor, source in gap.results() if self._carried.name(tensor) == name}
            sources |= {
                number
                for number, entry in enumerate(gap.tape.entries)
                if any(self._carried.name(outside.tensor) == name for outside in entry.arguments.outside)
            }
            derived = gap.reading(sources)
            for tensor, source in gap.results():
                if source.entry in derived:
                    self._derived[id(tensor)] = weakref.ref(tensor), name

    # -- in a step ----------------------------------------------------------------------------------------------

    def attempt_began(self, attempt: StepAttempt) -> None:
        """Notes which carried tensors the step has read, and looks at those that it has made or written."""
        if not self._follows:
            return
        self._note_reads()
        self._carried.round_ended(Round.STEP)
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
        values = Parcel(dict(zip(found, largest(tensor for tensor, _ in found.values()), strict=True)))
        if values.arrived:
            known = {name: value is None or math.isfinite(value) for name, value in values.values().items()}
            new = [name for name, good in known.items() if not good and name in self._finite and name not in self._bad]
            self._left = tuple((name, found[name][1]) for name in new)
            self._turned(known, lambda _: False)

    def _note_reads(self) -> None:
        alive = {id(tensor): tensor for tensor, _ in self._tape.calls.results.alive()}
        for reference in (each for entry in self._tape.calls.entries for each in entry.arguments.outside):
            tensor = reference.tensor if id(reference.tensor) == reference.identity else alive.get(reference.identity)
            if tensor is not None:
                self._carried.read(Round.STEP, tensor)
            name = self._carried.name(tensor) if tensor is not None else self._carried.name_by_id(reference.identity)
            if self._bad.get(name) is False:
                self._read.append(name)
            name = self._derived_from(reference.identity) or name
            if name and not self._between.is_fed(name):
                self._names[reference.identity] = name
        self._bad.update(dict.fromkeys(self._read, True))
        self._between.read({*self._names.values()})

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


def _obstacle(models: Models) -> str:
    """Why nothing is followed between steps: wrappers give the memory of weights back, and none of it is to be read."""
    return obstacle_to_replay(itertools.chain(models.roots, models.modules))


def _buffer_name(models: Models, tensor: Tensor) -> str:
    """The qualified name of a buffer of the models; empty for any other tensor."""
    buffers = models.buffers()
    return next((".".join(filter(None, (module, name))) for module, name, each in buffers if each is tensor), "")


def largest(tensors: Iterator[Tensor]) -> list[Tensor | None]:
    """The largest magnitude of each tensor as a device scalar; None for those that are not measured."""
    left, chosen, places = MOST_LOOKED_AT, [], []
    every = list(tensors)
    for place, tensor in enumerate(every):
        plain = type(tensor) is Tensor and tensor.is_floating_point() and stats.measurable(tensor)
        if plain and tensor.numel() <= left and tensor.untyped_storage().nbytes():  # sharded weights give memory back
            left -= tensor.numel()
            chosen.append(tensor.detach())
            places.append(place)
    with torch.no_grad():
        norms = torch._foreach_norm(chosen, math.inf) if chosen else []
    found: list[Tensor | None] = [None] * len(every)
    for place, norm in zip(places, norms, strict=True):
        found[place] = norm
    return found
