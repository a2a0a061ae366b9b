"""What a step reads of the tensors that its loop carries, and what it leaves of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from ampscope.capture.replay.step_tape import StepTape
from ampscope.capture.replay.tape.entry import EarlierResult, Entry, EntryKind
from ampscope.capture.step.carried.between_steps import BetweenSteps
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
        between: Knows what the calls before the step made.
        written: Knows which of them left something bad.

    Attributes:
        names: Of what the step reads, by ``id``.
        left: What it has left not finite.
    """

    def __init__(
        self, tape: StepTape, carried: Carried, condition: Condition, between: BetweenSteps, written: WrittenBetween
    ) -> None:
        self._tape = tape
        self._carried = carried
        self._condition = condition
        self._between = between
        self._written = written
        self._start = 0  # of the step, on the tape
        self._read: list[str] = []  # though not finite, for the first time
        self.names: dict[int, str] = {}
        self.left: tuple[tuple[str, EarlierResult], ...] = ()

    def begin(self) -> None:
        """A step begins."""
        self.left, self._read, self.names = (), [], {}
        self._start = self._tape.calls.end

    def entries(self) -> Iterator[Entry]:
        """The calls of the step."""
        calls = self._tape.calls
        return (calls[number] for number in range(max(self._start, calls.start), calls.end))

    def outside(self) -> set[int]:
        """Identities of what it read from outside."""
        return {reference.identity for entry in self.entries() for reference in entry.arguments.outside}

    def take_read(self) -> bool:
        """Whether it read something that is not finite for the first time; told once."""
        read, self._read = self._read, []
        return bool(read)

    def note_reads(self) -> None:
        """Notes which carried tensors the step has read."""
        self._carried.round_ended(Round.STEP)
        alive = {id(tensor): tensor for tensor, _ in self._tape.calls.results.alive()}
        results = self._tape.calls.results.alive()
        before = {(source.entry, source.leaf): tensor for tensor, source in results if source.entry < self._start}
        for entry in self.entries():
            for source in entry.arguments.earlier:
                made = before.get((source.entry, source.leaf))
                if made is not None:  # by the step before, which the tape has not forgotten
                    self._carried.read(Round.STEP, made)
            for reference in entry.arguments.outside:
                tensor = reference.tensor if id(reference.tensor) == reference.identity else None
                self._note_read(reference.identity, tensor if tensor is not None else alive.get(reference.identity))
        self._condition.was_read(self._read)
        self._written.read({*self.names.values()})

    def _note_read(self, identity: int, tensor: Tensor | None) -> None:
        """The step has read a tensor that it has not made, which may be gone."""
        if tensor is not None:
            self._carried.read(Round.STEP, tensor)
        name = self._carried.name(tensor) if tensor is not None else self._carried.name_by_id(identity)
        if self._condition.is_unread(name):
            self._read.append(name)
        name = self._condition.derived_from(identity) or name or self._between.passed_on(identity)
        if name and not self._written.is_fed(name):
            self.names[identity] = name

    def look_at_writes(self) -> None:
        """Looks at the carried tensors that the step has made or written."""
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
            new = [name for name, finite in known.items() if not finite and self._condition.is_new(name)]
            self.left = tuple((name, found[name][1]) for name in new)
            self._condition.turned(known, lambda _: False)
