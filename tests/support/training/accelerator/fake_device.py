"""Device "fake" for PyTorch: two devices whose clock, counters and memory a test can ask about.

To be registered once in a process, which then has an accelerator for good: see the marker ``accelerator``.
"""

from __future__ import annotations

import ctypes
import sys
import traceback
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration

from tests.support.training.accelerator.build import library

TYPE = "fake"
DEVICES = 2
#: Ticks after which what is launched is done, if it is never waited for.
NEVER = 2**40


class Count(IntEnum):
    """What is counted, in the order of ``device.h``."""

    LAUNCHES = 0
    ITEMS = 1  #: values of one element read by the host
    COPIES_TO_HOST = 2  #: that the host waits for
    COPIES_TO_DEVICE = 3  #: that the host waits for
    SHAPES = 4  #: results whose shape depends on values
    EVENTS = 5  #: waited for before they had happened
    STREAM_WAITS = 6


WAITS = frozenset(Count) - {Count.LAUNCHES}


@cache
def register() -> None:
    """Gives this process the device.

    Raises:
        NoCompilerError: There is nothing to build it with.
    """
    _call("register")
    backend_registration.rename_privateuse1_backend(TYPE)
    torch._register_device_module(TYPE, _module())
    backend_registration.generate_methods_for_privateuse1_backend()


@cache
def _compiled() -> ctypes.CDLL:
    return ctypes.CDLL(str(library()))


def _call(function: str, *arguments: Any) -> int:
    """Calls a function of ``device.cpp``; what is returned by one that returns nothing has no meaning."""
    found = getattr(_compiled(), f"accelerator_{function}")
    found.restype = ctypes.c_int64
    return int(found(*arguments))


# -- the clock and the counters ---------------------------------------------------------------------------------------


@contextmanager
def latency(launches: int) -> Iterator[None]:
    """In the body, what is launched is done so many launches later; all of it is done after the body."""
    _call("set_latency", ctypes.c_int64(launches))
    try:
        yield
    finally:
        _call("set_latency", ctypes.c_int64(0))
        for index in range(DEVICES):
            torch.accelerator.synchronize(index)


def counts() -> Counter[Count]:
    """All counts since the process began; subtract an earlier one."""
    return Counter({which: _call("count", int(which)) for which in Count})


@contextmanager
def waits_noted() -> Iterator[list[tuple[Count, str]]]:
    """What made the host wait in the body, and the innermost Python lines from which it did."""
    noted: list[tuple[Count, str]] = []

    def note(which: int) -> None:
        frames = traceback.extract_stack(sys._getframe(1), limit=6)
        noted.append((Count(which), " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames))))

    told = ctypes.CFUNCTYPE(None, ctypes.c_int)(note)
    _call("on_wait", told)
    try:
        yield noted
    finally:
        _call("on_wait", None)


def allocated() -> int:
    """Bytes of device memory in use."""
    return _call("allocated", False)


@contextmanager
def most_allocated() -> Iterator[list[int]]:
    """Afterwards holds the most bytes that were in use in the body beyond those before it."""
    before, found = allocated(), [0]
    _call("forget_most_allocated")
    yield found
    found[0] = _call("allocated", True) - before


# -- what torch looks for in a device's module -------------------------------------------------------------------------


def _module() -> types.ModuleType:
    module = types.ModuleType(f"torch.{TYPE}")
    vars(module).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _initialized=True,
        _lazy_init=lambda: None,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: DEVICES,
        current_device=torch.accelerator.current_device_index,
        set_device=torch.accelerator.set_device_index,
        device=_Device,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        manual_seed=_seed,
        manual_seed_all=_seed_all,
        get_rng_state=_get_rng_state,
        set_rng_state=_set_rng_state,
    )
    return module


class _Device:
    """Makes a device the current one."""

    def __init__(self, device: torch.device | str | int) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self._before)


def _index(device: torch.device | str | int | None) -> int:
    if isinstance(device, int):
        return max(device, 0)
    named = torch.device(device).index if device is not None else None
    return torch.accelerator.current_device_index() if named is None else named


def _seed(seed: int, device: torch.device | str | int | None = None) -> None:
    _call("seed", _index(device), ctypes.c_uint64(seed % 2**64))


def _seed_all(seed: int) -> None:
    for index in range(DEVICES):
        _seed(seed, index)


def _get_rng_state(device: torch.device | str | int | None = TYPE) -> Tensor:
    state = torch.empty(_call("generator_size"), dtype=torch.uint8, device="cpu")
    _call("get_generator", _index(device), ctypes.c_void_p(state.data_ptr()))
    return state


def _set_rng_state(state: Tensor, device: torch.device | str | int | None = TYPE) -> None:
    _call("set_generator", _index(device), ctypes.c_void_p(state.data_ptr()))
