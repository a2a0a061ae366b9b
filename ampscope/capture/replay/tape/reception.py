"""Keeps what one collective of a step brought from other ranks, for a replay that must not ask for it again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ampscope.capture.replay.tape.fingerprints import alike
from ampscope.capture.torch_support.torch_private import version_counter
from ampscope.capture.tracing.statistics.stats import extremes, measurable

#: Bytes of received tensors up to which they are copied: what the loop does with them afterwards takes nothing away.
COPIED_BYTES = 64 << 10

#: Why what the loop began and has not waited for cannot be used.
NOT_WAITED = "the loop has not waited for it"

#: Ops that send what they receive into, and those that send their second argument. What one rank alone sends is not
#: looked at: on the others it may be memory without values.
_SEND_FIRST = frozenset({"allreduce_", "reduce_"})
_SEND_SECOND = frozenset(
    {
        "allgather_",
        "_allgather_base_",
        "gather_",
        "reduce_scatter_",
        "_reduce_scatter_base_",
        "alltoall_",
        "alltoall_base_",
    }
)


@dataclass(slots=True)
class Reception:
    """A collective that the loop began, and what it left in this rank's tensors."""

    op: str  #: name of the ``c10d`` op
    group: str
    received: list[Tensor] = field(default_factory=list)  #: copies, or the loop's own tensors without their history
    extremes: list[Tensor] = field(default_factory=list)  #: of what this rank sent
    versions: list[int] = field(default_factory=list)  #: of the loop's tensors when they had arrived; none for copies
    copied: bool = False
    obstacle: str = NOT_WAITED  #: why it cannot be used, in words; empty where it can

    def arrived(self) -> None:
        """The loop has waited for it: the values are there."""
        if self.obstacle != NOT_WAITED:
            return
        self.copied = sum(tensor.nbytes for tensor in self.received) <= COPIED_BYTES
        if self.copied:
            self.received = [tensor.clone() for tensor in self.received]
        else:
            self.versions = [version_counter(tensor) for tensor in self.received]
        self.obstacle = ""

    def difference(self, op: str, group: str, args: tuple[Any, ...]) -> str:
        """Why it is not what a collective that is about to begin would bring, in words; empty where it is.

        Args:
            op: Name of the ``c10d`` op.
            group: Name of its process group.
            args: Its arguments.
        """
        if self.obstacle:
            return self.obstacle
        targets = list(tensors_in(args[0]))
        same = [(each.shape, each.dtype) for each in targets] == [(each.shape, each.dtype) for each in self.received]
        if (op, group) != (self.op, self.group) or not same:
            return "the real step did something else at this place"
        if not self.copied and self.versions != [version_counter(tensor) for tensor in self.received]:
            return "what it brought was changed in place since"
        if not alike(extremes_of(op, args), self.extremes):
            return "what this rank sends came out otherwise this time"
        return ""

    def hand_to(self, args: tuple[Any, ...]) -> None:
        """Writes what was received into the tensors of a collective that is run again; no counter of theirs moves."""
        for target, value in zip(tensors_in(args[0]), self.received, strict=True):
            target.data.copy_(value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of an argument of a collective, through nested lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def extremes_of(op: str, args: tuple[Any, ...]) -> list[Tensor]:
    """Least and greatest value (or NaN) of each tensor that this rank is about to send; no sync."""
    sent = args[0] if op in _SEND_FIRST else args[1] if op in _SEND_SECOND else ()
    return [end for tensor in tensors_in(sent) if measurable(tensor) for end in extremes(tensor)]
