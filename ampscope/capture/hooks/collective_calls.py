"""Tells open scopes of the collectives that Python code begins, and of the waits for them.

Those that torch's C++ code begins (``DistributedDataParallel``'s reducer, functional collectives) do not pass here,
but for the one by which ``DistributedDataParallel`` gives every rank the buffers of one before a forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ampscope.capture.torch_support import dynamo, guard
from ampscope.capture.torch_support.threads import HomeThread, Listeners, changing

#: Methods of a process group, and the op of ``c10d`` that each runs.
OPS = {
    "allreduce": "allreduce_",
    "broadcast": "broadcast_",
    "reduce": "reduce_",
    "allgather": "allgather_",
    "_allgather_base": "_allgather_base_",
    "all_gather_single": "_allgather_base_",
    "reduce_scatter": "reduce_scatter_",
    "_reduce_scatter_base": "_reduce_scatter_base_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "alltoall": "alltoall_",
    "alltoall_base": "alltoall_base_",
    "all_to_all_single": "alltoall_base_",
    "gather": "gather_",
    "scatter": "scatter_",
    "recv": "recv_",
}


#: Function of ``torch.distributed`` that writes one rank's tensors into those of all others, and waits for that.
_SPREAD = "_broadcast_coalesced"
_SPREAD_ARGUMENTS = 4  #: group, tensors, bytes at once, the rank whose tensors they are


class CollectiveCall(NamedTuple):
    """A collective that is about to begin."""

    op: str  #: name of the ``c10d`` op
    group: Any
    method: str  #: of the group
    args: tuple[Any, ...]

    def again(self, *args: Any) -> Any:
        """Begins it once more, on other tensors."""
        return getattr(self.group, self.method)(*args)


class CollectiveListener(Protocol):
    """Receives the collectives of the loop for a scope; each call must return quickly and never raise."""

    def collective_begins(self, call: CollectiveCall) -> Any | None:
        """A collective is about to begin; returns a note of it, None where nobody wants one."""

    def collective_began(self, note: Any, work: Any) -> None:
        """The collective of ``note`` has begun, and ``work`` is how the loop waits for it."""

    def waited(self, work: Any) -> None:
        """The loop has waited for a work."""

    def overwritten(self, tensors: list[Tensor]) -> None:
        """Tensors of this rank hold another rank's values now."""


_listeners: Listeners[CollectiveListener] = Listeners()
_originals: list[tuple[Any, str, Any]] = []


def join(listener: CollectiveListener, home: HomeThread) -> None:
    """Starts telling ``listener`` of its thread's; nothing happens where torch was built without distributed."""
    if not dist.is_available():
        return
    with changing:
        if not _listeners:
            _install()
        _listeners.join(listener, home)


def _install() -> None:
    group = dist.ProcessGroup
    for name, op in OPS.items():
        if name in vars(group):
            _replace(group, name, _heard(op, name, getattr(group, name)))
    works: list[Any] = [dist.distributed_c10d.Work, *dist.distributed_c10d.Work.__subclasses__()]
    for work in works:
        if "wait" in vars(work):
            _replace(work, "wait", _wait_heard(work.wait))
    if _SPREAD in vars(dist):
        _replace(dist, _SPREAD, _spread_heard(getattr(dist, _SPREAD)))


def leave(listener: CollectiveListener) -> None:
    """Stops telling ``listener``; nothing of AMPscope is left in torch after the last one."""
    with changing:
        while _listeners.leave(listener) and _originals:
            owner, name, original = _originals.pop()
            if getattr(vars(owner)[name], "ampscope_heard", False):  # nobody has put something around ours
                setattr(owner, name, original)


def _replace(owner: Any, name: str, heard: Any) -> None:
    heard.ampscope_heard = True
    _originals.append((owner, name, vars(owner)[name]))
    setattr(owner, name, dynamo.breaks_graph(heard))


def _heard(op: str, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a process group that says what it begins."""

    @wraps(original)
    def heard(group: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or torch.compiler.is_compiling():  # ``torch.distributed`` names no argument
            return original(group, *args, **kwargs)
        call = CollectiveCall(op, group, method, args)
        told = [(each, guard.tell(each.collective_begins, call)) for each in _listeners]
        work = original(group, *args)
        for listener, note in told:
            if note is not None:
                guard.tell(listener.collective_began, note, work)
        return work

    return heard


def _wait_heard(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Work.wait`` that says that it is over."""

    @wraps(original)
    def heard(work: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(work, *args, **kwargs)
        if not torch.compiler.is_compiling():
            for listener in _listeners:
                guard.tell(listener.waited, work)
        return result

    return heard


def _spread_heard(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function that spreads one rank's tensors, which says so on all others."""

    @wraps(original)
    def heard(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if len(args) == _SPREAD_ARGUMENTS and not torch.compiler.is_compiling():  # as torch itself calls it
            group, tensors, _, source = args
            if group.rank() != source:
                for listener in _listeners:
                    guard.tell(listener.overwritten, list(tensors))
        return result

    return heard
