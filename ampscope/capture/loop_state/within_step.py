"""Notes what a step reads of the tensors that its loop carries, and what it leaves of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from torch import Tensor

from ampscope.capture.loop_state.bad_writes import WrittenBetween
from ampscope.capture.loop_state.held_state import AttributeLooks, largest_within
from ampscope.capture.loop_state.loop_tensors import Carried, Condition, Round, role_of
from ampscope.capture.tape.call_tape import Tape
from ampscope.capture.tape.step_tape import StepTape
from ampscope.capture.tape.tape_entry import EarlierResult, Entry, EntryKind
from ampscope.capture.torch_support.readback import Parcel

#: Times that what one attribute holds is looked into when it turns bad: where nothing suffers, that is what it is for.
MOST_TURNS = 4


class _Left(NamedTuple):
    """A tensor that the step has made or written, and that may be read later."""

    name: str
    tensor: Tensor
    source: EarlierResult | None  #: None for one that lies in a plain attribute of a module
    attribute: str = ""  #: that one
    is_new: bool = False  #: it holds one of that name for the first time


class _Look(NamedTuple):
    """The carried tensors that a step has left, on the way to be known as finite or not."""

    step: int
    left: list[_Left]
    parcel: Parcel
    calls: Tape  #: of the step

    def bad(self, condition: Condition) -> Iterator[tuple[str, list[_Left]]]:
        """Yields, by name, what is not finite but was at the look before, or is new; waits for what has not arrived."""
        finite = [value is None or math.isfinite(value) for value in self.parcel.values().values()]
        by_name: dict[str, list[int]] = {}
        for place, each in enumerate(self.left):
            by_name.setdefault(each.name, []).append(place)
        for name, places in by_name.items():
            was_finite = condition.was_finite(name)
            bad = condition.seen(name, [(self.left[place].tensor, finite[place]) for place in places])
            found = [self.left[places[each]] for each in bad]
            if found and (was_finite or found[0].is_new):
                yield name, found


class WithinStep:
    """The carried tensors in the step in progress.

    Args:
        tape: The tape of the step.
        carried: Learns what the loop carries.
        condition: Learns what of that is finite.
        written: Tells of bad writes between steps that the step reads what comes of.

    Attributes:
        names: Of what the step reads, by ``id``.
        labels: Of the bad writes that it reads what comes of.
        left: What it has left not finite.
        left_in_attributes: Likewise in plain attributes of the modules: their names, and what they are known by.
    """

    def __init__(self, tape: StepTape, carried: Carried, condition: Condition, written: WrittenBetween) -> None:
        self._tape = tape
        self._carried = carried
        self._condition = condition
        self._written = written
        self._start = 0  # of the step, on the tape
        self._read: set[str] = set()  # labels of bad writes, what comes of which it was the first to read
        self.names: dict[int, str] = {}
        self.labels: set[str] = set()
        self.left: tuple[tuple[str, EarlierResult], ...] = ()
        self.left_in_attributes: dict[str, str] = {}
        self._attributes = AttributeLooks()
        self._turned: set[str] = set()  # attributes that hold what is not finite since this step
        self._turns: Counter[str] = Counter()  # how often each has while no step went wrong
        self._look: _Look | None = None
        self._is_noted = False  # what the step in progress reads

    def begin(self) -> None:
        """A step begins."""
        if self._look is not None:
            self._condition.unknown(each.name for each in self._look.left)
        self._look, self._turned = None, set()
        self.left, self.left_in_attributes, self.names = (), {}, {}
        self.labels, self._read, self._is_noted = set(), set(), False
        self._start = self._tape.calls.end

    def entries(self) -> Iterator[Entry]:
        """The calls of the step."""
        calls = self._tape.calls
        return (calls[number] for number in range(max(self._start, calls.start), calls.end))

    def outside(self) -> set[int]:
        """Identities of what it read from outside."""
        return {reference.identity for entry in self.entries() for reference in entry.arguments.outside}

    def take_read(self) -> bool:
        """Whether it read what comes of a bad write for the first time; told once."""
        read, self._read = self._read, set()
        return bool(read)

    def note_reads(self, *, but: Tensor | None) -> None:
        """Notes which carried tensors the step has read.

        Args:
            but: The loss scale, which every step reads, and whose history is kept elsewhere.
        """
        self._carried.round_ended(Round.STEP)
        alive = {id(tensor): tensor for tensor, _ in self._tape.calls.results.alive()}
        results = self._tape.calls.results.alive()
        before = {(source.entry, source.leaf): tensor for tensor, source in results if source.entry < self._start}
        for entry in self.entries():
            for source in entry.arguments.earlier:
                made = before.get((source.entry, source.leaf))
                if made is not None and made is not but:  # by the step before, which the tape has not forgotten
                    self._carried.read(Round.STEP, made)
            for reference in entry.arguments.outside:
                if reference.identity == id(but):
                    continue
                tensor = reference.tensor if id(reference.tensor) == reference.identity else None
                self._note_read(reference.identity, tensor if tensor is not None else alive.get(reference.identity))
        self._is_noted = True
        self._note_labels()

    def _note_labels(self) -> None:
        self.note_descent()
        self._read |= self._condition.read(self.labels)
        self._written.read(self.labels)

    def _note_read(self, identity: int, tensor: Tensor | None) -> None:
        """The step has read a tensor that it has not made, which may be gone."""
        if tensor is not None:
            self._carried.read(Round.STEP, tensor)
        name = self._carried.name(tensor) if tensor is not None else self._carried.name_by_id(identity)
        if name and not self._condition.is_given(name):
            self.names[identity] = name

    def note_descent(self) -> None:
        """Notes what the step has read that comes of bad writes, and what it has made of that."""
        descent = self._condition.descent
        if not descent:
            return
        own = {*dict(self.left), *self.left_in_attributes.values()}
        for label, readers in descent.readers(self._tape.calls, self._start).items():
            if label in own:
                continue
            self.labels.add(label)
            for number in readers:
                for outside in self._tape.calls[number].arguments.outside:
                    if (descent.label_by_id(outside.identity) or descent.label(outside.tensor)) == label:
                        self.names[outside.identity] = label
            descent.follow(self._tape.calls, readers, label)
        self._note_attributes(own)

    def _note_attributes(self, own: set[str]) -> None:
        """Notes labels of what the modules held in plain attributes at the step's start: it may have read it."""
        for held in self._tape.state.attribute_tensors():
            label = self._condition.descent.label(held.tensor)
            if label and label not in own:
                self.labels.add(label)
                self.names[id(held.tensor)] = label

    def look_at_writes(self, step: int) -> None:
        """Looks at the carried tensors that the step, of that number, has made or written."""
        self._send(step, [*self._results(), *self._in_attributes()])

    def look_at_attributes(self, step: int) -> None:
        """Looks only at the tensors that the step, of that number, has left in plain attributes of the modules."""
        if self._tape.state.held:
            self._send(step, self._in_attributes())

    def _results(self) -> Iterator[_Left]:
        for tensor, source in list(self._tape.calls.results.alive()):
            entry = self._tape.calls[source.entry]
            if entry.kind is EntryKind.BACKWARD or tensor.requires_grad:
                continue
            if entry.in_place:
                self._carried.wrote(tensor)
            else:
                self._carried.made(Round.STEP, tensor, role_of(entry, source.leaf))
            name = self._carried.name(tensor)
            if name:
                yield _Left(name, tensor, source)

    def _in_attributes(self) -> list[_Left]:
        """Returns the tensors that the modules hold in plain attributes, as far as the step has changed them.

        What an earlier step left there is named by it, for a replay of this one.
        """
        if not self._tape.state.held:
            return []
        before, now = self._tape.state.attribute_tensors(), self._tape.state.held.now()
        for identity, name in self._attributes.left_there(before).items():
            self.names.setdefault(identity, name)
        known = {each.name for each in before}
        return [
            _Left(each.name, each.tensor, None, each.attribute, each.name not in known)
            for each in self._attributes.changed(now)
        ]

    def _send(self, step: int, left: list[_Left]) -> None:
        if left:
            largest = largest_within([each.tensor for each in left])
            parcel = Parcel(dict(zip(map(str, range(len(left))), largest, strict=True)))
            self._look = _Look(step, left, parcel, self._tape.calls)
        self.arrived()

    def arrived(self, *, wait: bool = False) -> None:
        """Learns what of that was not finite, once the host knows."""
        look = self._look
        if look is None or not (wait or look.parcel.arrived):
            return
        self._look = None
        for name, bad in look.bad(self._condition):
            label = self._left_bad(look, name, bad)
            self.left += tuple((label, each.source) for each in bad if each.source is not None)
            for each in bad:
                if each.attribute:
                    self.left_in_attributes[each.name] = label
                    self._turned.add(each.attribute)

    def _left_bad(self, look: _Look, name: str, bad: list[_Left]) -> str:
        """A step has left these of one name not finite; returns what they are known by."""
        label = self._written.label(name, look.step)
        sources = {each.source.entry for each in bad if each.source is not None}
        self._condition.descent.follow(look.calls, sources, label)
        for each in bad:
            self._condition.descent.add(each.tensor, label)
        return label

    def to_be_told(self) -> Callable[[], set[str]]:
        """The step ends before the host knows what it has left: gives the labels of that when it is asked."""
        look, self._look, self._is_noted = self._look, None, False
        return partial(self._left_by, look) if look is not None else set

    def _left_by(self, look: _Look) -> set[str]:
        """Labels of what an earlier step has left not finite, which the present one may have read meanwhile; waits."""
        labels = {self._left_bad(look, name, bad) for name, bad in look.bad(self._condition)}
        if labels and self._is_noted:
            self._note_labels()
        return labels

    def has_left_bad(self) -> bool:
        """Whether the step has left something not finite, as far as the host knows; not told for the umpteenth time."""
        if self._look is not None:
            self.arrived()
        if not self._turned:
            return bool(self.left)
        turned, self._turned = self._turned, set()
        self._turns.update(turned)
        often = all(self._turns[each] > MOST_TURNS for each in turned)
        if often:
            self._condition.read(set(self.left_in_attributes.values()))
        return bool(self.left) or not often
