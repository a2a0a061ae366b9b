"""Brings small values from the device to the host without making the training thread wait for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

Values = dict[str, float | None]


class Parcel:
    """A few device scalars on their way to the host.

    Args:
        values: Zero-dimensional tensors or numbers by name; None stays None. What is on the host already has arrived.

    Attributes:
        is_here: Nothing of it is on its way any more, and `here` are the values.
    """

    def __init__(self, values: dict[str, Tensor | float | None]) -> None:
        far: dict[str, Tensor] = {}
        self.here: Values = {}
        for name, value in values.items():
            if isinstance(value, Tensor) and not value.is_cpu:
                far[name], self.here[name] = value, None
            elif isinstance(value, Tensor):
                # torch warns of a number that is made of one with a gradient
                self.here[name] = float(value.detach() if value.requires_grad else value)
            else:
                self.here[name] = value
        self.is_here = not far
        if far:
            self._send(far)

    def _send(self, far: dict[str, Tensor]) -> None:
        """Starts one copy of all values, in as many launches as they have devices and dtypes."""
        alike: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name, value in far.items():
            alike.setdefault((value.device, value.dtype), []).append(name)
        home = next(iter(alike))[0]
        self._names = [name for names in alike.values() for name in names]
        stacked = [torch.stack([far[name].detach().reshape(()) for name in names]) for names in alike.values()]
        wide = [each.to(home, torch.float64, non_blocking=True) for each in stacked]
        self._device = torch.cat(wide) if len(wide) > 1 else wide[0]  # kept until it has been copied
        self._host = torch.empty(len(far), dtype=torch.float64, pin_memory=home.type != "mps")  # which shares it
        self._host.copy_(self._device, non_blocking=True)
        self._event: torch.Event = torch.Event(home.type)
        self._event.record(torch.accelerator.current_stream(home))  # not that of the device that is current

    @property
    def arrived(self) -> bool:
        """Whether `values` can be had without waiting."""
        return self.is_here or bool(self._event.query())

    def values(self) -> Values:
        """The values; waits for what has not arrived."""
        if not self.is_here:
            self._event.synchronize()
            self.here |= zip(self._names, self._host.tolist(), strict=True)
            self.is_here = True
        return self.here


class Readback:
    """Parcels in the order in which they were sent, each with what is to happen when it arrives."""

    def __init__(self) -> None:
        self._travelling: deque[tuple[Parcel, Callable[[Values], None]]] = deque()

    def fetch(self, values: dict[str, Tensor | float | None], then: Callable[[Values], None]) -> None:
        """Calls ``then`` with every value as a float, now or at a later `poll`, never out of order."""
        parcel = Parcel(values)
        if not self._travelling and parcel.is_here:
            then(parcel.here)
        else:
            self._travelling.append((parcel, then))
            self.poll()

    def poll(self) -> None:
        """Hands over what has arrived."""
        while self._travelling and self._travelling[0][0].arrived:
            self._hand_over()

    def drain(self) -> None:
        """Waits for everything and hands it over."""
        while self._travelling:
            self._hand_over()

    def _hand_over(self) -> None:
        parcel, then = self._travelling.popleft()
        then(parcel.values())
