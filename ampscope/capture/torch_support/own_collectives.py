"""Every collective of AMPscope's own is refused, but for one: gradients averaged over ranks that have all agreed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ampscope.capture.torch_support import process_group, torch_private
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


def why_not_averaged(gradients: Mapping[str, Tensor]) -> str:
    """Why gradients cannot be averaged, in words; empty where they can."""
    plain = all(type(each) is Tensor and each.layout is torch.strided for each in gradients.values())
    return "" if plain else "a gradient is sparse, or of a class of its own"


def gradient_signature(gradients: Mapping[str, Tensor]) -> list[list[str]]:
    """Lists each gradient's name, shape and dtype in a fixed order, which has to be the same on all ranks."""
    return [[name, str(tuple(each.shape)), str(each.dtype)] for name, each in sorted(gradients.items())]


class Averaging:
    """Gradients of this rank, laid out to be averaged as ``DistributedDataParallel`` does.

    Args:
        gradients: By name; none of them is changed.
    """

    def __init__(self, gradients: Mapping[str, Tensor]) -> None:
        self._like = dict(sorted(gradients.items()))
        kinds = dict.fromkeys((each.dtype, each.device) for each in self._like.values())
        with torch.no_grad():
            self._flat = {kind: torch.cat([each.reshape(-1) for each in self._of(kind)]) for kind in kinds}

    def _of(self, kind: tuple[torch.dtype, torch.device]) -> list[Tensor]:
        return [each for each in self._like.values() if (each.dtype, each.device) == kind]

    def over(self, group: Any) -> dict[str, Tensor]:
        """The average over the ranks of a process group, by name. Communicates: all of them must call it now."""
        with torch.no_grad(), contextlib.ExitStack() as past:
            for aside in torch_private.past_modes():
                past.enter_context(aside)
            for flat in self._flat.values():
                dist.all_reduce(flat.mul_(1.0 / group.size()), group=group)
        at = dict.fromkeys(self._flat, 0)
        averaged: dict[str, Tensor] = {}
        for name, like in self._like.items():
            kind = (like.dtype, like.device)
            averaged[name] = self._flat[kind][at[kind] : at[kind] + like.numel()].reshape(like.shape)
            at[kind] += like.numel()
        return averaged
