"""The state around a call that decides its numbers: autocast, grad mode and the default device."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch


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
    """Autocast, grad mode and default device at a call."""

    regions: tuple[Region, ...]
    cache: bool
    grad: bool
    device: torch.device | None = None  #: on which tensors are made; None where the loop has chosen none

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of the enabled autocast region, the accelerator's first; None outside."""
        for region in reversed(self.regions):
            if region.enabled:
                return region.dtype
        return None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Runs the body under this state."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.device is not None:
                stack.enter_context(self.device)
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


@contextlib.contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Keeps weights that are cast in the body, perhaps without a history, from being taken for those of the step."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


#: States that were met, by what torch tells of each: it is asked at every function of a loop's own code.
_met: dict[tuple[Any, ...], Ambient] = {}
_MOST_MET = 256


def current(types: tuple[str, ...]) -> Ambient:
    """The state now."""
    return _ambient(types, torch.is_grad_enabled())


def _ambient(types: tuple[str, ...], grad: bool, switched_off: Sequence[str] = ()) -> Ambient:
    """The state now, but for grad mode; autocast counts as on where it is off for AMPscope's own work alone."""
    device = getattr(sys.modules.get("torch.utils._device"), "CURRENT_DEVICE", None)  # see `default_device`
    told: list[Any] = [types, torch.is_autocast_cache_enabled(), grad, device]
    for kind in types:
        told.append(kind in switched_off or torch.is_autocast_enabled(kind))
        told.append(torch.get_autocast_dtype(kind))
    key = tuple(told)
    known = _met.get(key)
    if known is None:
        regions = tuple(map(Region, types, told[4::2], told[5::2]))
        known = Ambient(regions, told[1], grad, device)
        if len(_met) >= _MOST_MET:
            _met.clear()
        _met[key] = known
    return known


class PlainState:
    """Autocast and inference mode off, for AMPscope's own work; the weights that autocast has cast stay cast.

    Leaving a ``torch.autocast`` region would let go of those, and what the loop casts anew has another history. So the
    switch of each device type is turned by itself, where it is on.

    Args:
        types: The device types.
    """

    __slots__ = ("_grad", "_inference", "_is_entered", "_switched", "_types")

    def __init__(self, types: tuple[str, ...]) -> None:
        self._types = types
        self._switched: list[str] = []
        self._grad, self._is_entered = True, False
        self._inference: contextlib.AbstractContextManager[None] | None = None

    def enter(self) -> None:
        """Switches off what is on."""
        self._grad = torch.is_grad_enabled()  # leaving inference mode switches it on
        self._is_entered, self._switched = True, []
        for kind in self._types:
            if torch.is_autocast_enabled(kind):
                self._switched.append(kind)  # first: so it is switched on again, wherever this is broken off
                torch.set_autocast_enabled(kind, False)
        if torch.is_inference_mode_enabled():
            self._inference = torch.inference_mode(False)
            self._inference.__enter__()

    def leave(self) -> None:
        """Puts it back; grad mode too, which work that was broken off may have left otherwise."""
        if self._inference is not None:
            self._inference.__exit__(None, None, None)
            self._inference = None
        for kind in self._switched:
            torch.set_autocast_enabled(kind, True)
        self._switched = []
        if self._is_entered and torch.is_grad_enabled() != self._grad:
            torch.set_grad_enabled(self._grad)
        self._is_entered = False

    def around(self) -> Ambient:
        """The loop's own state, while this is entered."""
        return _ambient(self._types, self._grad, self._switched)
