"""The judge of what stands still in half precision: a buffer, an average or a weight whose updates are rounded away.

It is told from one that has nowhere to go by where a step in float32 moves it, look after look.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ampscope.capture.tracing.sites import dtype_name
from ampscope.trace.evidence import LostUpdates

#: Looks in a row in which a tensor has to stand still.
READINGS = 3
#: Share of a tensor's elements that must stand still although float32 moves them.
MOST_STILL = 0.9
#: How far from where it is heading such an element must be, as a share of its value.
_FAR = 0.1
#: A second run in float32 begins with values this much larger: what is left of that afterwards is what they keep.
LARGER = 1.5
#: The least share of a value that a step replaces, as far as float32 can tell.
_LEAST = 2.0**-20
#: How much the steps of a counter may differ.
_ALIKE = 2.0**-10


class Movement(NamedTuple):
    """The movement of a tensor in a step in float32."""

    moved: Tensor  #: the change of each element (float32)
    follows: Tensor  #: which share of each element the step replaces: the momentum of a running average


def movement_of(before: Tensor, after: Tensor, larger: Tensor, after_larger: Tensor) -> Movement:
    """The movement, from two runs.

    Args:
        before: What it held (float32).
        after: What it holds after the step in float32.
        larger: What it held in a second run.
        after_larger: What it holds after that.
    """
    shifted = larger - before
    keeps = torch.where(shifted != 0, (after_larger - after) / shifted, 0.0)
    return Movement(after - before, (1 - keeps).clamp(_LEAST, 1.0))


def enlarged(tensor: Tensor) -> Tensor:
    """The values with which a second run begins."""
    return torch.where(tensor == 0, torch.ones_like(tensor), tensor * LARGER)


class _Reading(NamedTuple):
    step: int
    before: Tensor
    movement: Movement

    @property
    def heading(self) -> Tensor:
        """How far each element is from what it follows, by its movement in float32."""
        return self.movement.moved / self.movement.follows


class Stillness:
    """The looks at one tensor in which it stood still.

    Args:
        dtype: Of the tensor.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._since = 0
        self._readings: list[_Reading] = []

    def read(self, step: int, before: Tensor, found: Movement) -> None:
        """Takes down a look in which the tensor stood still in a step, where float32 moves it."""
        if not self._readings:
            self._since = step
        self._readings = [*self._readings, _Reading(step, before.detach().float(), found)][-READINGS:]

    @property
    def is_lost(self) -> bool:
        """Whether its updates are rounded away; waits for the device."""
        return len(self._readings) == READINGS and float(self._far_off().float().mean()) >= MOST_STILL / 2

    def _far_off(self) -> Tensor:
        """The elements that float32 moves the same way each time, and that are far from where they are heading."""
        headings = torch.stack([each.heading for each in self._readings])
        same_way = (headings > 0).all(0) | (headings < 0).all(0)
        value = self._readings[-1].before.abs().clamp(min=torch.finfo(self._dtype).smallest_normal)
        return same_way & (headings.mean(0).abs() > _FAR * value) & self._follows_or_counts()

    def _follows_or_counts(self) -> Tensor:
        """Leaves out sums of changing terms, small ones of which may be meant to be small (a warm-up)."""
        moved = torch.stack([each.movement.moved for each in self._readings])
        follows = torch.stack([each.movement.follows for each in self._readings]).amin(0) > 2 * _LEAST
        return follows | ((moved - moved[-1]).abs() <= _ALIKE * moved[-1].abs()).all(0)

    def described(self, name: str) -> LostUpdates:
        """Describes the tensor that stands still for the evidence of an incident; means over the elements far off."""
        far = self._far_off()
        heading = torch.stack([each.heading for each in self._readings]).mean(0)
        return LostUpdates(
            name=name,
            module=name.rpartition(".")[0],
            dtype=dtype_name(self._dtype),
            since=self._since,
            last=self._readings[-1].step,
            share=float(far.float().mean()),
            value=float(self._readings[-1].before[far].abs().mean()),
            off_by=float(heading[far].abs().mean()),
        )


#: How many times what it follows an average must be: roundings alone leave second moments off by some times.
_FAR_OFF = 16.0
#: By which factor it would have decayed in float32 since it stood still.
_DECAYED = math.log(4.0)
#: Share of a tensor's elements of which both must be so.
_MOST_DECAYED = 0.45


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
        return self._looks >= READINGS and float(self._far_off.float().mean()) >= _MOST_DECAYED

    @property
    def _follows_what(self) -> Tensor:
        return self._value.float() + self._heading / self._looks

    @property
    def _far_off(self) -> Tensor:
        far = self._follows_what.abs() * _FAR_OFF <= self._value.float().abs()
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


#: Looks that it takes at least, and the numbers that they have to give in all.
_LOOKS, _NUMBERS = 5, 40
#: Share of a tensor's elements that must have lost a whole spacing of their dtype.
_MOST_DRIFTED = 0.45
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
        return bool(share >= _MOST_DRIFTED and directed > threshold * power)

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
