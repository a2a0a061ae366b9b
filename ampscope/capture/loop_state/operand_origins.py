"""Learns, while the loop is listened to, by which calls it makes what a step reads: later on nobody may listen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ampscope.capture.loop_state.loop_calls import Gap
from ampscope.capture.tape.functional_calls import named_tensors
from ampscope.capture.tape.tape_entry import Entry, EntryKind
from ampscope.capture.torch_support.models import Models
from ampscope.trace.evidence import EarlierCall, MadeBefore
from ampscope.trace.schema import Node

#: Functions that hand numbers on as they are, and those that make tensors of no other.
_HANDS_ON = {
    *("__getitem__", "T", "mT", "cat", "chunk", "clone", "concat", "contiguous", "cpu", "cuda", "detach", "expand"),
    *("expand_as", "flatten", "flip", "gather", "index_select", "movedim", "narrow", "new_empty", "permute"),
    *("pin_memory", "repeat", "reshape", "roll", "select", "split", "squeeze", "stack", "swapaxes", "take", "tile"),
    *("transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as"),
}
#: Stands for what the step has computed itself.
_OTHER = torch.empty(0)
#: Calls of which the evidence tells, the last ones.
_MOST_TOLD = 24


class OperandOrigins:
    """Knows by which calls between the steps the loop makes the tensors that its steps read.

    Args:
        models: The watched models.

    Attributes:
        known: By name of an input of the step, as it was learned last.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self.known: dict[str, MadeBefore] = {}

    def learn(self, gap: Gap, entries: Iterable[Entry], step: int) -> None:
        """Learns from the calls before a step, and from its own.

        Args:
            gap: The calls before it.
            entries: Its own.
            step: Its number.
        """
        made = {id(tensor): source.entry for tensor, source in gap.results() if source.entry >= gap.taken_over}
        self.known = {}
        for name, identity in self._inputs(entries) if made else ():
            origin = self._origin(gap, made[identity], step) if identity in made else None
            if origin is not None:
                self.known.setdefault(name, origin)  # of two of one name a replay tells of the first, too

    def _inputs(self, entries: Iterable[Entry]) -> Iterator[tuple[str, int]]:
        """Yields what the calls of a step read from outside, by the names that a replay gives it."""
        for entry in entries:
            if entry.kind is EntryKind.BACKWARD or entry.through is not None:
                continue
            identities = {id(each.tensor): each.identity for each in entry.arguments.outside}
            args, kwargs = entry.arguments.resolved(lambda each: getattr(each, "tensor", _OTHER))
            for tensor, node, name in named_tensors(entry, args, kwargs, self._models):
                if node is Node.INPUT and id(tensor) in identities:
                    yield name, identities[id(tensor)]

    def _origin(self, gap: Gap, number: int, step: int) -> MadeBefore | None:
        """Tells of the calls that a result is made of and that compute; None where all of them hand on."""
        leading = [each for each in gap.leading_to([number]) if self._computes(gap.tape[each], gap.dtypes[each])]
        if not leading:
            return None
        told = leading[-_MOST_TOLD:]
        return MadeBefore(step=step, calls=tuple(_earlier_call(gap.tape[each], gap.dtypes[each]) for each in told))

    @staticmethod
    def _computes(entry: Entry, dtype: str) -> bool:
        return bool(entry.arguments.tensors) and bool(dtype) and _name(entry) not in _HANDS_ON


def _earlier_call(entry: Entry, dtype: str) -> EarlierCall:
    at = entry.place
    return EarlierCall(name=_name(entry), dtype=dtype, file=at.file, line=at.line, function=at.function, code=at.text)


def _name(entry: Entry) -> str:
    return getattr(entry.call, "__name__", type(entry.call).__name__)
