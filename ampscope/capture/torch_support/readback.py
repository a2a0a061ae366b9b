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
    """

    def __init__(self, values: dict[str, Tensor | float | None]) -> None:
        far = {
            name: value for name, value in values.items() if isinstance(value, Tensor) and value.device.type != "cpu"
        }
        self._near: Values = {n: None if v is None else float(v) for n, v in values.items() if n not in far}
        self._names = list(far)
        self._event: torch.Event | None = None
        if far:
            self._send(list(far.values()))

    def _send(self, tensors: list[Tensor]) -> None:
        home = tensors[0].device
        flat = [tensor.detach().reshape(()).to(home, torch.float64, non_blocking=True) for tensor in tensors]
        self._device = torch.stack(flat)  # kept until it has been copied
        self._host = torch.empty(len(flat), dtype=torch.float64, pin_memory=home.type == "cuda")
        self._host.copy_(self._device, non_blocking=True)
        self._event = torch.Event(home.type)
        self._event.record()

    @property
    def arrived(self) -> bool:
        """Whether `values` can be had without waiting."""
        return self._event is None or bool(self._event.query())

    def values(self) -> Values:
        """The values; waits for what has not arrived."""
        if self._event is None:
            return self._near
        self._event.synchronize()
        return self._near | dict(zip(self._names, self._host.tolist(), strict=True))


class Readback:
    """Parcels in the order in which they were sent, each with what is to happen when it arrives."""

    def __init__(self) -> None:
        self._travelling: deque[tuple[Parcel, Callable[[Values], None]]] = deque()

    def fetch(self, values: dict[str, Tensor | float | None], then: Callable[[Values], None]) -> None:
        """Calls ``then`` with every value as a float, now or at a later `poll`, never out of order."""
        self._travelling.append((Parcel(values), then))
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
