"""Whether another run of a step fits into memory, and giving back what one took that did not fit."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.dynamo import OwnMode
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.own_collectives import PLAIN
from ampscope.capture.torch_support.sharding import local
from ampscope.capture.torch_support.tensor_tree import inner_tensors
from ampscope.capture.tracing import operators

#: Share of the free memory that a replay may take.
SHARE = 0.8
#: Bytes of gradients from which on the host's allocator is asked to give back what it holds in reserve.
LARGE = 16 << 20
NO_ROOM = "there is not enough free memory to run the step once more"


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
    """Raised when the forward pass of a replay gives more than there is room for in memory."""


class Bounded(OwnMode):
    """Active in a replay whose size nobody knows: ends it when its forward has given more than there is room for.

    What the forward gives is what a step keeps for its backward, at the most.

    Args:
        most: Bytes; None for no bound.
    """

    def __init__(self, most: int | None) -> None:
        super().__init__()
        self._left = math.inf if most is None else most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not PLAIN.issuperset(types) and not torch_private.are_fake(types):
            return NotImplemented  # a wrapper subclass: its inner ops come by again
        result = func(*args, **(kwargs or {}))
        if torch_private.current_backward_node() is None and not operators.describe(func).passes_through:
            results = operators.flat_tensors(result if isinstance(result, (tuple, list)) else (result,))
            self._left -= sum(each.numel() * each.element_size() for each in results)
            if self._left < 0:
                raise NoRoomError(NO_ROOM)
        return result


def _free(device: torch.device) -> int | None:
    """Bytes free on a device, those the allocator keeps in reserve included; None where nobody can tell."""
    if device.type == "cuda":
        unused, _ = torch.cuda.mem_get_info(device)
        return int(unused + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return _free_on_host() if device.type == "cpu" else None


def _free_on_host() -> int | None:
    """Bytes that the machine, and whatever limits this process to a part of it, have left."""
    found = [each for each in (_kilobytes("/proc/meminfo", "MemAvailable:"), *_left_by_limits()) if each is not None]
    return min(found, default=None)


def _left_by_limits() -> list[int | None]:
    """Bytes left of the memory that a control group (a container, a batch job) gives the processes in it."""
    left: list[int | None] = []
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                root = Path("/sys/fs/cgroup", controllers)
                left += [_left_in(folder) for folder in {root, root / path.lstrip("/")}]
    return left


def _left_in(folder: Path) -> int | None:
    """Bytes left in a control group, those that files are cached in included; None where it has no limit."""
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        with suppress(OSError, ValueError):  # "max" is no limit
            most, now = int((folder / limit).read_text()), int((folder / used).read_text())
            lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return most - now + next((int(size) for name, size in lines if name == "inactive_file"), 0)
    return None


def _kilobytes(path: str, name: str) -> int | None:
    """A number of kilobytes that the kernel tells in a file, in bytes."""
    with suppress(OSError, ValueError, IndexError):
        lines = (line.split() for line in Path(path).read_text().splitlines())
        return next((1024 * int(line[1]) for line in lines if line[0] == name), None)
    return None


def obstacle(models: Models) -> str:
    """Why a step is not even begun to be run as it was, in words; empty where it fits.

    A device that has too little says so, and the replay ends. A host that has too little ends the process.
    """
    if models.main_device().type != "cpu":
        return ""
    most, now = (_kilobytes("/proc/self/status", name) for name in ("VmHWM:", "VmRSS:"))
    beside = max(0, (most or 0) - (now or 0))  # what the training has taken at its peak, and has let go of since
    most_more = room(models.main_device())
    needed = beside + of_weights(models, lambda dtype: dtype)
    return "" if most_more is None or needed <= most_more else NO_ROOM


class _Collector:
    """Python's collector of cycles, as replays leave it; a part of the process that all threads share."""

    def __init__(self) -> None:
        self.rests = False  #: it was on, and a replay has switched it off

    def rest(self) -> None:
        """Switches it off, if it is on."""
        if gc.isenabled():
            self.rests = True
            gc.disable()

    def collect(self) -> None:
        """While it rests: takes away what has become garbage of late, as it would have done itself."""
        if self.rests:
            gc.collect(0)

    def go_on(self) -> None:
        """Switches it on again, if it rests."""
        if self.rests:
            gc.enable()
            self.rests = False


collector = _Collector()


@contextlib.contextmanager
def collector_resting() -> Iterator[None]:
    """Spares the loop the collections of all objects that those of a replay would provoke: each takes steps' time.

    Young garbage is collected after each call that is replayed, and at the end.
    """
    outermost = not collector.rests
    try:
        collector.rest()
        yield
    finally:
        collector.collect()
        if outermost:
            collector.go_on()


def trim(models: Models) -> None:
    """Has the host's allocator give back what has been freed: glibc keeps as much as a whole step has used."""
    if models.main_device().type == "cpu" and of_weights(models, lambda dtype: dtype) >= LARGE and _trim() is not None:
        _trim()(0)


@cache
def _trim() -> Any:
    """The function of glibc; None with another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def give_back(error: BaseException) -> None:
    """Returns the allocator's reserve after ``error`` ran out of memory: training finds the device as before."""
    if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
