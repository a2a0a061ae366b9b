"""Tells an optimizer's running average that half precision keeps from decaying from one that has nothing to forget.

An average in bfloat16 holds on to what came in once where a step takes less than half a spacing from it: a second
moment with beta2=0.999 never becomes smaller. In float32 it would have, as the same step on copies shows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ampscope.capture.step.measures.stillness import READINGS, Movement
from ampscope.capture.tracing.sites import dtype_name
from ampscope.trace.evidence import LostUpdates

#: How many times what it follows an average must be: roundings alone leave second moments off by some times.
_FAR = 16.0
#: By which factor it would have decayed in float32 since it stood still.
_DECAYED = math.log(4.0)
#: Share of a tensor's elements of which both must be so.
_MOST = 0.45


class Decay:
    """The looks at one average in which it stood still.

    Args:
        step: The first step at which it was looked at.
        value: A sample of its values.
    """

    def __init__(self, step: int, value: Tensor) -> None:
        self._since = self._last = step
        self._value = value
        self._looks = 0
        zeros = torch.zeros_like(value, dtype=torch.float32)
        self._heading, self._follows, self._down = zeros, zeros.clone(), torch.ones_like(zeros, dtype=torch.bool)

    def read(self, step: int, value: Tensor, found: Movement) -> None:
        """Takes down how a step in float32 moves the average, which in its own dtype stays at ``value``."""
        self._last, self._value = step, value
        self._looks += 1
        self._heading = self._heading + found.moved / found.follows
        self._follows = self._follows + found.follows
        self._down &= found.moved * value.float() < 0

    @property
    def is_lost(self) -> bool:
        """Whether it is far above what it follows, and float32 would be so no more; waits for the device."""
        return self._looks >= READINGS and float(self._far_off.float().mean()) >= _MOST

    @property
    def _follows_what(self) -> Tensor:
        return self._value.float() + self._heading / self._looks

    @property
    def _far_off(self) -> Tensor:
        far = self._follows_what.abs() * _FAR <= self._value.float().abs()
        forgotten = self._follows / self._looks * (self._last - self._since) >= _DECAYED
        return self._down & far & forgotten

    @property
    def evidence(self) -> LostUpdates:
        """Describes the running average for the evidence of an incident; means over the elements far off."""
        far = self._far_off
        value = self._value.float()[far]
        return LostUpdates(
            dtype=dtype_name(self._value.dtype),
            since=self._since,
            last=self._last,
            looks=self._looks,
            share=float(far.float().mean()),
            value=float(value.abs().mean()),
            update=float((self._follows / self._looks)[far].mean()),
            spacing=torch.finfo(self._value.dtype).eps,
            off_by=float(self._follows_what[far].abs().mean()),
        )
