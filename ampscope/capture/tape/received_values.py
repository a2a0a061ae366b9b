"""Notes what the loop's collectives bring during a step, in order, with the calls on the tape."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampscope.capture.hooks.collective_calls import CollectiveCall
from ampscope.capture.tape.call_tape import Tape
from ampscope.capture.tape.tape_entry import Entry, EntryKind, Reception, extremes_of, tensors_in
from ampscope.capture.torch_support import call_state, process_group, torch_private
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.modes import Pause
from ampscope.capture.torch_support.own_collectives import is_refused
from ampscope.capture.torch_support.sharding import obstacle_to_replay
from ampscope.capture.torch_support.user_line import NOWHERE, user_place

_PLAIN = (Tensor, nn.Parameter)
#: Bytes of received values that are kept alive for one step.
MOST_BYTES = 64 << 20
#: Bytes of a buffer up to which it is copied when another rank has written it: a larger one that forward never changes
#: holds the same before and after.
COPIED_BUFFER_BYTES = 1 << 20


class _Awaited(NamedTuple):
    """A collective that has begun, and for which the loop has not waited yet."""

    note: Reception
    number: int | None  #: of its own entry; None for one inside the call of another entry
    targets: list[Tensor]


class ReceivedValues:
    """A `collective_calls.CollectiveListener`.

    What begins inside a call on the tape is noted with that call's entry, which runs again as a whole. What the loop
    begins between such calls gets an entry of its own.

    Args:
        modules: The watched modules; those that are sharded are not replayed, and nothing is kept for them.
        pause: On while a collective is glanced at, which is timed, and left out of what is observed.
        guard: Catches faults.
    """

    def __init__(self, modules: Callable[[], Iterable[nn.Module]], pause: Pause, guard: Guard) -> None:
        self._modules = modules
        self._pause = pause
        self._guard = guard
        self._types = call_state.device_types()
        self._tape: Tape | None = None  # while calls are put onto it
        self._entry: Entry | None = None  # of the call in progress
        self._after_backward = False  # what the loop sends now are gradients, or figures to log
        self._thread = 0
        self._kept_bytes = 0
        self._overwritten: list[tuple[Tensor, Tensor]] = []  # since the latest call of a module began
        self._works: dict[int, tuple[Any, _Awaited]] = {}  # by id of the work, which is held until the loop waits
        self._wanted: bool | None = None  # whether a replay could use anything; not known before the first is asked

    def step_began(self, tape: Tape) -> None:
        """A step begins on ``tape``, with the whole budget; what no wait has ended is forgotten."""
        self._tape, self._entry, self._wanted = tape, None, None
        self._after_backward = False
        self._kept_bytes = 0
        self.let_go()

    def let_go(self) -> None:
        """Keeps none of what no wait has ended."""
        self._overwritten = []
        self._works.clear()

    def complete(self) -> None:
        """Puts nothing more onto the tape."""
        self._tape = self._entry = None

    def begin(self, entry: Entry) -> None:
        """Notes that the call of an entry, or its backward, runs from here on."""
        self._entry, self._thread = entry, threading.get_ident()
        if entry.kind is EntryKind.MODULE:
            entry.overwritten, self._overwritten = self._overwritten, []

    def end(self) -> None:
        """Notes that the call of the entry is over."""
        self._after_backward = self._entry is not None and self._entry.kind is EntryKind.BACKWARD
        self._entry = None

    # -- collective_calls.CollectiveListener --------------------------------------------------------------------

    def collective_begins(self, call: CollectiveCall) -> _Awaited | None:
        """See `CollectiveListener`."""
        if self._tape is None or self._guard.broken or not self._is_of_step() or is_refused():
            return None
        if not all(type(tensor) in _PLAIN and tensor.layout is torch.strided for tensor in tensors_in(call.args)):
            if self._entry is not None:
                self._entry.received.append(Reception(call.op, "", obstacle="what it received was no plain tensor"))
            return None
        with self._guard, self._glancing():
            if not self._is_wanted():
                return None
            number, entry, targets = None, self._entry, list(tensors_in(call.args[0]))
            if entry is None:
                ambient, place = call_state.ambient_now(self._types), user_place() or NOWHERE
                number, entry = self._tape.collective_call(call.again, call.args, ambient=ambient, place=place)
            entry.received.append(self._noted(call, targets))
            return _Awaited(entry.received[-1], number, targets)
        return None

    def collective_began(self, note: _Awaited, work: Any) -> None:
        """See `CollectiveListener`."""
        self._works[id(work)] = (work, note)

    def waited(self, work: Any) -> None:
        """See `CollectiveListener`."""
        _, awaited = self._works.pop(id(work), (None, None))
        if awaited is None or self._guard.broken:
            return
        with self._guard, self._glancing():
            awaited.note.arrived()
            if awaited.number is not None and self._tape is not None:
                self._tape.arrived(awaited.number, awaited.targets)

    def overwritten(self, tensors: list[Tensor]) -> None:
        """See `CollectiveListener`: a wrapper has its buffers written within its call, before that of what it wraps."""
        if self._tape is None or self._guard.broken or threading.get_ident() != self._thread or is_refused():
            return
        with self._guard, self._glancing():
            if self._is_wanted():
                small = [tensor for tensor in tensors if tensor.nbytes <= COPIED_BUFFER_BYTES]
                known = self._overwritten if self._entry is None else self._entry.overwritten
                known += zip(small, self._copied(small), strict=True)

    def _copied(self, tensors: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return [tensor.clone() for tensor in tensors]

    @contextlib.contextmanager
    def _glancing(self) -> Iterator[None]:
        self._pause.begin_glance()
        try:
            past_dispatch, past_functions = torch_private.past_modes()
            with past_dispatch, past_functions:
                yield
        finally:
            self._pause.end_glance()

    # -- noting -------------------------------------------------------------------------------------------------

    def _is_of_step(self) -> bool:
        """Whether a replay would come by here too.

        It runs no hooks of parameters, and neither the hooks nor the callbacks of a wrapper that reduces gradients.
        """
        node = torch_private.current_backward_node()
        if node is not None:
            return self._entry is not None and "AccumulateGrad" not in node.name()
        if threading.get_ident() != self._thread:
            return False
        return not self._after_backward if self._entry is None else self._entry.kind is EntryKind.MODULE

    def _is_wanted(self) -> bool:
        if self._wanted is None:
            joined = process_group.rank_of()
            alone = joined is None or joined[1] == 1
            self._wanted = not alone and not obstacle_to_replay(self._modules())
        return self._wanted

    def _noted(self, call: CollectiveCall, targets: list[Tensor]) -> Reception:
        note = Reception(call.op, str(call.group.group_name))
        kept = [tensor.detach() for tensor in targets]
        size = sum({torch_private.storage_key(each): each.untyped_storage().nbytes() for each in kept}.values())
        if self._kept_bytes + size > MOST_BYTES:
            note.obstacle = f"the step received more than AMPscope keeps ({MOST_BYTES >> 20} MiB)"
        else:
            self._kept_bytes += size
            note.received, note.extremes = kept, extremes_of(call.op, call.args)
        return note
