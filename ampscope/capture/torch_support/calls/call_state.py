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
    return around(types, torch.is_grad_enabled())


def around(types: tuple[str, ...], grad: bool, switched_off: Sequence[str] = ()) -> Ambient:
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
