"""Tells a weight whose updates are rounded away from one that has nowhere to go, by what its optimizer meant to do.

Updates that come of nothing but the noise of batches cancel each other, in float32 too. Those of a weight that training
moves have a direction: what of them is lost adds up, until float32 would hold another number.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ampscope.capture.tracing.sites import dtype_name
from ampscope.trace.evidence import LostUpdates

#: Looks that it takes at least, and the numbers that they have to give in all.
_LOOKS, _NUMBERS = 5, 40
#: Share of a tensor's elements that must have lost a whole spacing of their dtype.
_MOST = 0.45
#: A weight that moved before has stood still for this many times as long: all but a short time of the run.
_MOST_OF_RUN = 4
#: How many times the power of what cancels the direction must have (1 for noise), and how much more of few numbers.
_DIRECTED, _OF_FEW = 3.0, 8.0


class Drift:
    """The updates that a weight was to get while it stood still.

    Args:
        step: The first step at which it was looked at.
        value: A sample of its values, which all looks see the same.

    Attributes:
        since: That step.
    """

    def __init__(self, step: int, value: Tensor) -> None:
        self._value = value
        self.since = self._last = step
        self._looks = 0
        zeros = torch.zeros_like(value, dtype=torch.float32)
        self._sum, self._squares, self._lost = zeros, zeros.clone(), zeros.clone()

    def read(self, step: int, update: Tensor) -> None:
        """A step was to change it like this (float32), and so, about, were all since the look before."""
        self._lost = self._lost + update * max(1, step - self._last)
        self._sum, self._squares = self._sum + update, self._squares + update.square()
        self._looks += 1
        self._last = step

    @property
    def is_lost(self) -> bool:
        """Whether its updates had a direction, and float32 would hold another number by now; waits for the device."""
        count = self._sum.numel()
        few = self._looks < _LOOKS or self._looks * count < _NUMBERS
        if few or self._last - self.since < _MOST_OF_RUN * self.since:
            return False
        directed, power, share = torch.stack(
            (self._sum.square().sum(), self._squares.sum(), (self._lost.abs() >= self._spacing).float().mean())
        ).tolist()
        threshold: float = max(_DIRECTED, 1 + _OF_FEW / math.sqrt(count))
        return bool(share >= _MOST and directed > threshold * power)

    @property
    def _spacing(self) -> Tensor:
        """How far the next number of its dtype is from each element."""
        info = torch.finfo(self._value.dtype)
        _, exponent = torch.frexp(self._value.float().abs().clamp(min=info.smallest_normal))
        return torch.ldexp(torch.full_like(self._lost, info.eps / 2), exponent)

    @property
    def evidence(self) -> LostUpdates:
        """Describes the weight for the evidence of an incident."""
        return LostUpdates(
            dtype=dtype_name(self._value.dtype),
            since=self.since,
            last=self._last,
            looks=self._looks,
            value=float(self._value.float().abs().mean()),
            update=float((self._squares / self._looks).mean().sqrt()),
            spacing=float(self._spacing.mean()),
            off_by=float(self._lost.abs().mean()),
        )
