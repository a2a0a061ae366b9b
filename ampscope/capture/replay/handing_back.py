"""Gives a step that is run again what the real step received from other ranks, instead of asking them for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ampscope.capture.replay.tape.entry import Entry
from ampscope.capture.replay.tape.reception import Reception
from ampscope.capture.torch_support.communication.refusal import Answering, CommunicationError

#: Why a replay in which something was changed does not go on.
OF_UNCHANGED = (
    "the step uses values that it received from other ranks, and what they would be with a change cannot be known"
)


class HandingBack(Answering):
    """Active in a faithful replay; answers each collective with what the real one at its place brought."""

    def __init__(self) -> None:
        super().__init__()
        self._left: Iterator[Reception] = iter(())
        self._works: list[Any] = []  # a work that Python made lives no longer than its Python object

    def entry_begins(self, entry: Entry) -> None:
        """The replay comes to an entry of the tape."""
        self._left = iter(entry.received)

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """See `Answering`.

        Raises:
            CommunicationError: What the real step received is not there.
        """
        library, _, name = func._schema.name.partition("::")
        why = "what it received was not seen"
        if library == "c10d" and not kwargs:
            if name in ("barrier", "send"):
                return self._done()
            note = next(self._left, None)
            why = why if note is None else note.difference(name, _group_of(func, args), args)
            if note is not None and not why:
                note.hand_to(args)
                return (args[0], self._done()) if len(func._schema.returns) > 1 else self._done()
        raise CommunicationError(f"the step communicates with other ranks ({func}), and {why}")

    def _done(self) -> Any:
        self._works.append(_Done())
        return self._works[-1].boxed()


def _group_of(func: Any, args: Any) -> str:
    names = [argument.name for argument in func._schema.arguments]
    group: Any = dist.ProcessGroup.unbox(args[names.index("process_group")])
    return str(group.group_name)


if dist.is_available():

    class _Done(dist.distributed_c10d.Work):
        """A work that is over."""

        def wait(self, timeout: Any = None) -> bool:
            return True

        def is_completed(self) -> bool:
            return True

        def is_success(self) -> bool:
            return True
