"""An update that is rounded away is told from a weight, or an average, that has nowhere to go."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ampscope.capture.events import StepAttempt
from ampscope.capture.loop_state.still_averages import READINGS, Movement
from ampscope.capture.tracing.sites import dtype_name
from ampscope.trace.evidence import LostUpdates

#: A training has come to its end where gradients and loss are smaller than they were by these factors,
_SMALL, _FALLEN = 0.05, 0.2
#: or where gradients are smaller by this one, and the loss has fallen by this share of its whole way at most.
_SMALLER, _FLAT = 0.5, 0.02


class Convergence:
    """The losses and norms that were seen at looks."""

    def __init__(self) -> None:
        self._losses: list[tuple[int, float]] = []
        self._norm = self._largest = 0.0

    def look(self, attempt: StepAttempt) -> None:
        """Takes down what is known of a step; waits for the device."""
        norm, loss = attempt.norm, attempt.opened.mean_loss()
        if norm is None:
            norm = attempt.opened.norms.get(id(attempt.optimizer))
        self._norm = float(norm) if norm is not None else math.nan
        self._largest = max(self._largest, self._norm)
        if loss is not None and math.isfinite(value := float(loss)):
            self._losses.append((attempt.step, value))

    def reached(self, since: int) -> bool:
        """Whether gradients and loss are small, or gradients are smaller and the loss has not fallen since a step."""
        losses = [loss for _, loss in self._losses]
        latest = [loss for step, loss in self._losses if step >= since]
        if not latest:
            return False
        if self._norm < _SMALL * self._largest and latest[-1] < _FALLEN * max(losses):
            return True
        half = max(1, len(latest) // 2)
        fallen = (sum(latest[:half]) - sum(latest[-half:])) / half
        return self._norm < _SMALLER * self._largest and fallen < _FLAT * (max(losses) - min(losses))


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
