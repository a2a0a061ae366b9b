"""Norms of differences between tensors, on their device until all are read at once."""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

#: Of an output, so many elements at most are compared with another execution's.
SAMPLE = 1 << 10
#: Scalars that lie end to end.
_BLOCK = 1 << 12


class Numbers:
    """Scalars on their devices, by number, until they are read.

    They lie end to end: thousands of small tensors among the large ones that come and go would keep the host's
    allocator from giving anything back.
    """

    def __init__(self) -> None:
        self._devices: list[torch.device] = []  # of each
        self._blocks: dict[torch.device, list[Tensor]] = {}
        self._used: Counter[torch.device] = Counter()

    def put(self, scalar: Tensor) -> int:
        """Takes a scalar; no wait. Returns its number."""
        device = scalar.device
        blocks, place = self._blocks.setdefault(device, []), self._used[device] % _BLOCK
        if not place:
            blocks.append(torch.empty(_BLOCK, dtype=precise(device), device=device))
        blocks[-1][place].copy_(scalar)
        self._used[device] += 1
        self._devices.append(device)
        return len(self._devices) - 1

    def read(self) -> list[float]:
        """All of them; waits for the device."""
        of_device = {device: iter(torch.cat(blocks).tolist()) for device, blocks in self._blocks.items()}
        return [next(of_device[device]) for device in self._devices]


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
