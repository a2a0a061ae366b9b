"""Brings small values from the device to the host without making the training thread wait for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Values = dict[str, float | None]


class Readback:
    """Copies of zero-dimensional tensors on their way to the host.

    On the CPU they are there at once. On CUDA they travel in one asynchronous copy and are handed over by a later
    `poll` that finds them arrived.
    """

    def __init__(self) -> None:
        self._travelling: deque[tuple[Any, Tensor, list[str], Values, Callable[[Values], None]]] = deque()

    def fetch(self, values: dict[str, Tensor | float | None], then: Callable[[Values], None]) -> None:
        """Calls ``then`` with every value as a float (None stays None), now or at a later `poll`."""
        known: Values = {}
        far: dict[str, Tensor] = {}
        for name, value in values.items():
            if isinstance(value, Tensor) and value.device.type != "cpu":
                far[name] = value
            else:
                known[name] = float(value) if value is not None else None
        if not far:
            then(known)
            return
        stacked = torch.stack([value.detach().reshape(()).double() for value in far.values()])
        host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=stacked.device.type == "cuda")
        host.copy_(stacked, non_blocking=True)
        event = torch.Event(stacked.device.type)
        event.record()
        self._travelling.append((event, host, list(far), known, then))

    def poll(self) -> None:
        """Hands over what has arrived, in order."""
        while self._travelling and self._travelling[0][0].query():
            self._hand_over()

    def drain(self) -> None:
        """Waits for everything and hands it over."""
        while self._travelling:
            self._travelling[0][0].synchronize()
            self._hand_over()

    def _hand_over(self) -> None:
        _, host, names, known, then = self._travelling.popleft()
        then(known | dict(zip(names, host.tolist(), strict=True)))
