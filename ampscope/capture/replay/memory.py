"""Whether another run of a step fits into memory, and giving back what one took that did not fit."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.communication.refusal import PLAIN
from ampscope.capture.torch_support.local_shards import local
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.tensor_tree import inner_tensors
from ampscope.capture.tracing import operators

#: Share of the free memory that a replay may take.
SHARE = 0.8


def fits(needed: int, device: torch.device) -> bool:
    """Whether about ``needed`` bytes can be had on ``device`` without pressing the training out.

    Args:
        needed: Estimated size of the step's results, bytes.
        device: Where the model lives.
    """
    most = room(device)
    return most is None or needed <= most


def of_weights(models: Models, dtype: Callable[[torch.dtype], torch.dtype]) -> int:
    """Bytes that the weights of another run take: gradients of its own, beside those of the training, and conversions.

    It shares the weights themselves, trained and frozen ones, as long as it reads them as they are.

    Args:
        models: The watched models.
        dtype: Gives the dtype in which it reads a weight of some dtype.
    """
    gradients = conversions = 0
    for each in (*(weight for _, weight in models.parameters.values()), *(buffer for *_, buffer in models.buffers())):
        for part in inner_tensors(each) or [local(each)]:
            size = part.numel() * dtype(part.dtype).itemsize
            gradients += size * each.requires_grad
            conversions += size * (dtype(part.dtype) is not part.dtype)
    return gradients + conversions


def room(device: torch.device) -> int | None:
    """Bytes that another run of a step may take on ``device``; None where nobody can tell."""
    free = _free(device)
    return None if free is None else int(SHARE * free)


class NoRoomError(Exception):
    """What the forward pass of a replay gives takes more memory than it may."""


class Bounded(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Active in a replay whose size nobody knows: ends it when its forward has given more than there is room for.

    What the forward gives is what a step keeps for its backward, at the most.

    Args:
        most: Bytes; None for no bound.
    """

    def __init__(self, most: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._left = math.inf if most is None else most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not PLAIN.issuperset(types) and not torch_private.are_fake(types):
            return NotImplemented  # a wrapper subclass: its inner ops come by again
        result = func(*args, **(kwargs or {}))
        if torch_private.current_backward_node() is None and not operators.describe(func).passes_through:
            results = operators.flat_tensors(result if isinstance(result, (tuple, list)) else (result,))
            self._left -= sum(each.numel() * each.element_size() for each in results)
            if self._left < 0:
                raise NoRoomError("there is not enough free memory to run the step once more")
        return result


def _free(device: torch.device) -> int | None:
    """Bytes free on a device, those the allocator keeps in reserve included; None where nobody can tell."""
    if device.type == "cuda":
        unused, _ = torch.cuda.mem_get_info(device)
        return int(unused + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    if device.type == "cpu" and "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def give_back(error: BaseException) -> None:
    """Returns the allocator's reserve after ``error`` ran out of memory: training finds the device as before."""
    if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
