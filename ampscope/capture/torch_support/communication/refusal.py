"""Refuses every collective of AMPscope's own: other ranks would take it for one of theirs, or wait for ever."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.communication import process_group
from ampscope.capture.torch_support.dynamo import OwnMode
from ampscope.capture.torch_support.guard import surely
from ampscope.trace.schema import COLLECTIVE_LIBRARIES

#: Classes of tensors that are no wrapper around others.
PLAIN = frozenset({Tensor, nn.Parameter})


class CommunicationError(RuntimeError):
    """Work of AMPscope's own, or a step that is run again, was about to communicate with other ranks."""


class NoCollectives(OwnMode):
    """A dispatch mode under which an op that communicates raises, before any other rank hears of it.

    It is active around all of AMPscope's own work, replays included, wherever there is a process group. In a replay
    it leaves the op to the mode that answers for what the real step received.
    """

    def __init__(self) -> None:
        super().__init__()
        self._group: Any = None
        self._has_others = False
        self.is_on = False  #: it is on the stack

    def enter(self) -> None:
        """Puts the mode on top of the stack, where the process has a process group with others in it."""
        group = process_group.default_group()
        if group is not self._group:  # asked often, so a group is looked at once
            self._group, self._has_others = group, group is not None and group.size() > 1
        if self._has_others:
            torch_private.push_dispatch_mode(self)
            self.is_on = True

    def leave(self) -> None:
        """Takes the mode off the stack, wherever it is."""
        if self.is_on:
            self.is_on = False
            surely(partial(torch_private.remove_dispatch_mode, self))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not PLAIN.issuperset(types) and not torch_private.are_fake(types):
            return NotImplemented  # a wrapper subclass: its inner ops come by again
        if communicates(func) and not any(isinstance(mode, Answering) for mode in torch_private.dispatch_modes()):
            raise CommunicationError(
                f"the step communicates with other ranks ({func}); a replay, or any work of AMPscope's own, must not"
            )
        return func(*args, **(kwargs or {}))


class Answering(OwnMode):
    """A dispatch mode at the bottom of the stack that has the result of an op that communicates, or knows why not."""

    def __init__(self) -> None:
        super().__init__()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Answers in the body, where otherwise nobody might communicate."""
        try:
            if is_refused():
                torch_private.insert_dispatch_mode(self)
            yield
        finally:
            surely(partial(torch_private.remove_dispatch_mode, self))

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an op that communicates, without communicating.

        Raises:
            CommunicationError: It is not known.
        """
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not PLAIN.issuperset(types) and not torch_private.are_fake(types):
            return NotImplemented
        return self.answer(func, args, kwargs or {}) if communicates(func) else func(*args, **(kwargs or {}))


def is_refused() -> bool:
    """Whether AMPscope's own work is being done, where there is anybody to communicate with."""
    return any(isinstance(mode, NoCollectives) for mode in torch_private.dispatch_modes())


#: Ops of these libraries that only wait for what has begun, or give it another form.
_LOCAL = frozenset({"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"})


def communicates(func: Any) -> bool:
    """Whether an op overload exchanges something with other ranks."""
    return func._schema.name.partition("::")[0] in COLLECTIVE_LIBRARIES and not only_waits(func)


def only_waits(func: Any) -> bool:
    """Whether an op overload belongs to a collective that has begun, and exchanges nothing itself."""
    home, _, name = func._schema.name.partition("::")
    return home in COLLECTIVE_LIBRARIES and name in _LOCAL
