"""Tells a running average that is rounded away from one that has come to its end, by a few looks at both.

One that has come to its end moves to and fro in float32; one that is rounded away moves the same way each time, and is
far from where it is heading. A counter follows nothing, and its steps are all alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ampscope.capture.tracing.sites import dtype_name
from ampscope.trace.evidence import LostUpdates

#: Looks in a row in which a tensor has to stand still.
READINGS = 3
#: Share of a tensor's elements that must stand still although float32 moves them.
MOST = 0.9
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


def movement(before: Tensor, after: Tensor, larger: Tensor, after_larger: Tensor) -> Movement:
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
        return len(self._readings) == READINGS and float(self._far_off().float().mean()) >= MOST / 2

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
