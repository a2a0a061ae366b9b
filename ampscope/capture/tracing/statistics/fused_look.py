"""Extremes and counts of many tensors on a GPU: one launch for each, no wait until all are read."""

from __future__ import annotations

import importlib.util
import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ampscope.trace.schema import Statistics

#: Dtypes whose numbers float32 holds exactly, in which the kernel computes.
_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
#: Elements that a program takes at a time, and programs of a launch at most: enough for every GPU of today.
_BLOCK, _PROGRAMS = 4096, 1024
#: Tensors for which there is room at first.
_ROOM = 256
_NOTHING_YET = (math.inf, -math.inf, -1.0)


def has_triton() -> bool:
    """Whether the kernel can be built at all."""
    return importlib.util.find_spec("triton") is not None


class FusedLook:
    """Looks at one tensor after another on one device, and tells all at once.

    Min, max, the largest finite magnitude and the counts of NaN and infinities, exact. Which numbers a tensor holds is
    taken when it is looked at, on the stream that made it.
    """

    def __init__(self, device: torch.device) -> None:
        from ampscope.capture.tracing.statistics.fused_kernel import KERNEL  # only where there is Triton

        self._kernel: Any = KERNEL
        self._device = device
        self._current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()  # where Triton launches
        self._banks: list[tuple[Tensor, Tensor]] = []
        self._used = 0

    def accepts(self, values: Tensor) -> bool:
        """Whether a tensor can be looked at this way: dense in memory, of a dtype that float32 holds."""
        dense = values.is_contiguous() and not values.is_neg()
        return values.device == self._device and values.dtype in _DTYPES and dense

    def look(self, values: Tensor) -> int:
        """Looks at a tensor and returns its number; no wait."""
        row = self._used % _ROOM
        if row == 0:
            self._grow()
        extremes, counts = self._banks[-1]
        size = values.numel()
        programs = min(-(-size // _BLOCK), _PROGRAMS)
        stride = programs * _BLOCK
        with self._current:
            self._kernel[(programs,)](values.detach(), size, extremes[row], counts[row], stride, BLOCK=_BLOCK)
        self._used += 1
        return self._used - 1

    def read(self) -> list[Statistics]:
        """Returns the statistics of every tensor looked at, in order; waits for the device."""
        rows: list[Statistics] = []
        for extremes, counts in self._banks:
            rows += map(_told, extremes.tolist(), counts.tolist())
        return rows[: self._used]

    def _grow(self) -> None:
        with torch.inference_mode(mode=False):  # else nothing could be written outside of that mode later
            extremes = torch.tensor(_NOTHING_YET).repeat(_ROOM, 1).to(self._device, non_blocking=True)
            self._banks.append((extremes, torch.zeros(_ROOM, 3, dtype=torch.int64, device=self._device)))


def _told(extremes: list[float], counts: list[int]) -> Statistics:
    (low, high, most), (nan, up, down) = extremes, counts
    if nan:
        low = high = math.nan
    return Statistics(low, high, nan, up, down, max_finite=most if most >= 0 else None)
