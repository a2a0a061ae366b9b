"""What a step reads of the tensors that its loop carries, and what it leaves of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from ampscope.capture.replay.step_tape import StepTape
from ampscope.capture.replay.tape.entry import EarlierResult, Entry, EntryKind
from ampscope.capture.step.carried.carried_tensors import Carried, Round, role_of
from ampscope.capture.step.carried.condition import Condition
from ampscope.capture.step.carried.written_between import WrittenBetween
from ampscope.capture.step.measures.state.held import largest_within
from ampscope.capture.torch_support.readback import Parcel


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

    def begin(self) -> None:
        """A step begins."""
        self.left, self.names = (), {}
        self.labels, self._read = set(), set()
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
        self.note_descent()
        self._read = self._condition.read(self.labels)
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
        own = dict(self.left)
        for label, readers in descent.readers(self._tape.calls, self._start).items():
            if label in own:
                continue
            self.labels.add(label)
            for number in readers:
                for outside in self._tape.calls[number].arguments.outside:
                    if (descent.label_by_id(outside.identity) or descent.label(outside.tensor)) == label:
                        self.names[outside.identity] = label
            descent.follow(self._tape.calls, readers, label)

    def look_at_writes(self, step: int) -> None:
        """Looks at the carried tensors that the step, of that number, has made or written."""
        found: list[tuple[str, Tensor, EarlierResult]] = []
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
                found.append((name, tensor, source))
        largest = largest_within([tensor for _, tensor, _ in found])
        values = Parcel(dict(zip(map(str, range(len(found))), largest, strict=True)))
        if values.arrived:
            self._found(step, found, [value is None or math.isfinite(value) for value in values.values().values()])

    def _found(self, step: int, found: list[tuple[str, Tensor, EarlierResult]], finite: list[bool]) -> None:
        by_name: dict[str, list[int]] = {}
        for place, (name, _, _) in enumerate(found):
            by_name.setdefault(name, []).append(place)
        left = []
        for name, places in by_name.items():
            was_finite = self._condition.was_finite(name)
            bad = self._condition.seen(name, [(found[place][1], finite[place]) for place in places])
            if bad and was_finite:
                label = self._written.label(name, step)
                sources = [found[places[each]][2] for each in bad]
                left += [(label, source) for source in sources]
                self._condition.descent.follow(self._tape.calls, {source.entry for source in sources}, label)
                for each in bad:
                    self._condition.descent.add(found[places[each]][1], label)
        self.left = tuple(left)
