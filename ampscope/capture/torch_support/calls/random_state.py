"""Saves and restores the random number generators that a call may draw from, on the host and on its devices."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.calls import call_state


class RandomState(NamedTuple):
    """States of every generator a call may draw from."""

    cpu: Tensor
    devices: dict[torch.device, Tensor]  #: of accelerators
    python: Any
    numpy: Any

    @staticmethod
    def take(devices: Iterable[torch.device] = (), *, host: bool = True) -> RandomState:
        """The states now; reads host memory only.

        Args:
            devices: Where the call may compute, besides the current device of the accelerator.
            host: Also those of Python's and NumPy's global generators, which cost more than torch's.
        """
        numpy, found = sys.modules.get("numpy") if host else None, _with_generators(devices)
        return RandomState(
            torch.get_rng_state(),
            dict(zip(found, map(_state, found), strict=True)),
            random.getstate() if host else None,
            numpy.random.get_state() if numpy is not None else None,
        )

    def put_back(self) -> None:
        """Sets every generator to this state.

        One that stands there is not touched: a write makes cuDNN draw the dropout of its recurrent layers anew.
        """
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            if not torch.equal(_state(device), state):
                _generators(device).set_rng_state(state, *_named(device))
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)

    def host_unchanged(self) -> bool:
        """Whether Python's and NumPy's generators still are as they were."""
        now = RandomState.take()
        same = self.python == now.python
        if self.numpy is None or now.numpy is None:
            return same and self.numpy is now.numpy
        return same and self.numpy[2:] == now.numpy[2:] and bool((self.numpy[1] == now.numpy[1]).all())


@contextlib.contextmanager
def random_state_kept(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Puts every generator back to where it was before the body.

    Args:
        devices: Where the body may compute, besides the current device of the accelerator.
    """
    state = RandomState.take(devices)
    try:
        yield
    finally:
        state.put_back()


#: Device types whose numbers come from the host's generator, or from none.
_HOST = frozenset({"cpu", "meta"})


@cache
def _accelerators() -> tuple[torch.device, ...]:
    """One device, without an index, for each type of accelerator that this process may use."""
    return tuple(torch.device(kind) for kind in dict.fromkeys(("cuda", *call_state.device_types()[1:])))


def _with_generators(devices: Iterable[torch.device]) -> set[torch.device]:
    """Returns the devices in use that have generators: from ``devices``, the default one, and the current one."""
    default = torch_private.default_device()
    all_devices = (*_accelerators(), *devices, *(() if default is None else (default,)))
    found = set()
    for device in all_devices:
        if device.type not in _HOST and _draws(device):
            found.add(_indexed(device))
    return found


def _generators(device: torch.device) -> Any:
    """The module of torch's that has the generators of a type of device; None where torch has none."""
    return getattr(torch, device.type, None)


def _draws(device: torch.device) -> bool:
    """Whether a type of device is in use, and has generators whose states can be read and written."""
    home = _generators(device)
    return getattr(home, "is_initialized", _always)() and hasattr(home, "get_rng_state")


def _always() -> bool:
    return True


def _indexed(device: torch.device) -> torch.device:
    """The current device of its type, where none is named."""
    index: int | None = device.index
    if index is None and _named(device):
        index = _generators(device).current_device()
    return device if index is None else torch.device(device.type, index)


def _named(device: torch.device) -> tuple[torch.device, ...]:
    """Returns the arguments that name a device to its generator's functions; none where its type has but one (mps)."""
    return (device,) if hasattr(_generators(device), "current_device") else ()


def _state(device: torch.device) -> Tensor:
    state: Tensor = _generators(device).get_rng_state(*_named(device))
    return state
