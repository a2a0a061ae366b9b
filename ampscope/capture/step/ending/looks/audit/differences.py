"""Norms of differences between tensors, on their device until all are read at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Of an output, so many elements at most are compared with another execution's.
SAMPLE = 1 << 10


class Numbers:
    """Scalars on their devices, by number, until they are read."""

    def __init__(self) -> None:
        self._scalars: list[Tensor] = []

    def put(self, scalar: Tensor) -> int:
        """Takes a scalar; no wait. Returns its number."""
        self._scalars.append(scalar)
        return len(self._scalars) - 1

    def read(self) -> list[float]:
        """All of them; waits for the device."""
        found = [math.nan] * len(self._scalars)
        by_device: dict[torch.device, list[int]] = {}
        for number, scalar in enumerate(self._scalars):
            by_device.setdefault(scalar.device, []).append(number)
        for numbers in by_device.values():
            values = torch.stack([self._scalars[number] for number in numbers]).tolist()
            for number, value in zip(numbers, values, strict=True):
                found[number] = value
        return found


def precise(device: torch.device) -> torch.dtype:
    """The dtype in which squares are added up: float64, where there is one."""
    return torch.float32 if device.type == "mps" else torch.float64


def norm(values: Tensor) -> Tensor:
    """The L2 norm, as a scalar on the device."""
    found: Tensor = torch.linalg.vector_norm(values, dtype=precise(values.device))
    return found


def difference(values: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
    """``values - wide``, and ``wide``, in its dtype: both zero where either stands for a mask, or is not finite.

    Args:
        values: What an op gave.
        wide: What it would have given, of the same shape.
    """
    ours = values.to(wide.dtype)
    kept = (ours.abs() < _most(values.dtype)) & (wide.abs() < _most(wide.dtype))
    known = torch.where(kept, wide, 0.0)
    return torch.where(kept, ours, 0.0) - known, known


def _most(dtype: torch.dtype) -> float:
    """Magnitudes from here on are not finite, or from the outer half of the dtype's range, and stand for a mask."""
    return torch.finfo(dtype).max / 2 if dtype.itemsize > 1 else math.inf
