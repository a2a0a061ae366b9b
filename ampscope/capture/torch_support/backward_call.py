"""A call of ``torch.autograd.backward``: its arguments, by position or by name, where it leads, and who sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.threads import PerThread
from ampscope.capture.torch_support.torch_private import past_modes

#: Functions in which user code runs that no function mode sees: a checkpoint's recomputation, a custom backward.
RUN_BACKWARD = (torch.autograd.backward, torch.autograd.grad, Tensor.backward)
#: Nodes of autograd's graph that are looked at for a parameter.
MOST_NODES = 2000


def backward_roots(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Returns the tensors that ``torch.autograd.backward`` was called on."""
    return list(tensor_tree.tensors(args[0] if args else kwargs.get("tensors")))


def backward_seeds(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The gradients of its roots that ``torch.autograd.backward`` begins with; empty where it takes ones."""
    return list(tensor_tree.tensors(args[1] if len(args) > 1 else kwargs.get("grad_tensors")))


def creates_graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a backward was asked to be differentiable itself (its fourth argument)."""
    return bool(args[3] if len(args) > 3 else kwargs.get("create_graph"))


def leads_to(roots: list[Tensor], parameters: Container[int]) -> bool:
    """Whether a backward from ``roots`` reaches one of ``parameters`` (by ``id``), among the nodes looked at."""
    front = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(front)
    while front and len(seen) < MOST_NODES:
        node = front.pop()
        if id(getattr(node, "variable", None)) in parameters:  # only the nodes that accumulate gradients have one
            return True
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        front += new
    return False


def factor_of(node: Any) -> float | None:
    """The number by which a node of autograd's graph multiplies a single value; None for any other factor."""
    metadata = getattr(node, "_input_metadata", ())
    if not metadata or len(metadata[0].shape):  # what was saved of larger tensors may have been put elsewhere
        return None
    factor = getattr(node, "_saved_other", None)
    if not isinstance(factor, Tensor) or factor.device.type != "cpu" or factor.dim():
        return None
    past_dispatch, past_functions = past_modes()
    with past_dispatch, past_functions:
        return float(factor)


_engine = PerThread(torch.autograd, "_engine_run_backward")


@contextlib.contextmanager
def in_engine(make: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Has a context, made anew each time, around whatever autograd's engine runs for this thread.

    For the replay of a step: what other threads run meanwhile is left alone.
    """

    def within(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_within(*args: Any, **kwargs: Any) -> Any:
            with make():
                return run(*args, **kwargs)

        return run_within

    with _engine.replaced(within):
        yield


def active_in_engine(mode: TorchFunctionMode) -> AbstractContextManager[None]:
    """Has ``mode`` active while the engine runs, though torch has taken it off for the backward."""
    return in_engine(lambda: mode)
