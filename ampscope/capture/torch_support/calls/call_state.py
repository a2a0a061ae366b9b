"""The state around a call that decides its numbers: autocast, grad mode and random number generators."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


@cache
def device_types() -> tuple[str, ...]:
    """Device types whose autocast state matters here: ``cpu`` and the accelerator, if there is one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu", accelerator.type) if accelerator is not None else ("cpu",)


class Region(NamedTuple):
    """Autocast state of one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype


class Ambient(NamedTuple):
    """Autocast and grad mode at a call."""

    regions: tuple[Region, ...]
    cache: bool
    grad: bool

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of the enabled autocast region, the accelerator's first; None outside."""
        return next((region.dtype for region in reversed(self.regions) if region.enabled), None)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Runs the body under this state."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for region in self.regions:
                if region.enabled != torch.is_autocast_enabled(region.device_type) or region.enabled:
                    stack.enter_context(
                        torch.autocast(region.device_type, region.dtype, region.enabled, cache_enabled=self.cache)
                    )
            yield


@contextlib.contextmanager
def one_autocast_cache() -> Iterator[None]:
    """Lets the regions entered in the body share their cast weights, as regions inside one outer region do."""
    with torch.autocast("cpu", enabled=False):
        yield


def current(types: tuple[str, ...]) -> Ambient:
    """The state now."""
    regions = tuple(Region(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types)
    return Ambient(regions, torch.is_autocast_cache_enabled(), torch.is_grad_enabled())


class PlainState:
    """Autocast and inference mode off, for AMPscope's own work; the weights that autocast has cast stay cast.

    Leaving a ``torch.autocast`` region would let go of those, and what the loop casts anew has another history. So the
    switch of each device type is turned by itself, where it is on.

    Args:
        types: The device types.
    """

    __slots__ = ("_grad", "_inference", "_switched", "_types")

    def __init__(self, types: tuple[str, ...]) -> None:
        self._types = types
        self._switched: list[str] = []
        self._grad = True
        self._inference: contextlib.AbstractContextManager[None] | None = None

    def enter(self) -> None:
        """Switches off what is on."""
        self._grad = torch.is_grad_enabled()  # leaving inference mode switches it on
        self._switched = [kind for kind in self._types if torch.is_autocast_enabled(kind)]
        for kind in self._switched:
            torch.set_autocast_enabled(kind, False)
        if torch.is_inference_mode_enabled():
            self._inference = torch.inference_mode(False)
            self._inference.__enter__()

    def leave(self) -> None:
        """Puts it back."""
        if self._inference is not None:
            self._inference.__exit__(None, None, None)
            self._inference = None
        for kind in self._switched:
            torch.set_autocast_enabled(kind, True)
        self._switched = []

    def around(self) -> Ambient:
        """The loop's own state, while this is entered."""
        regions = tuple(Region(kind, kind in self._switched, torch.get_autocast_dtype(kind)) for kind in self._types)
        return Ambient(regions, torch.is_autocast_cache_enabled(), self._grad)


def _cuda_is_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch leaves it untyped


class RandomState(NamedTuple):
    """States of every generator a forward may draw from."""

    cpu: Tensor
    accelerator: Tensor | None
    python: Any
    numpy: Any

    @staticmethod
    def take(*, host: bool = True) -> RandomState:
        """The states now; reads host memory only.

        Args:
            host: Also those of Python's and NumPy's global generators, which cost more than torch's.
        """
        accelerator = torch.cuda.get_rng_state() if _cuda_is_in_use() else None
        numpy = sys.modules.get("numpy") if host else None
        return RandomState(
            torch.get_rng_state(),
            accelerator,
            random.getstate() if host else None,
            numpy.random.get_state() if numpy is not None else None,
        )

    def put_back(self) -> None:
        """Sets every generator to this state."""
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.cuda.set_rng_state(self.accelerator)
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
def random_state_kept() -> Iterator[None]:
    """Puts every generator back to where it was before the body."""
    state = RandomState.take()
    try:
        yield
    finally:
        state.put_back()
