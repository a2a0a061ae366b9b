"""Modules that do their norm's work, and, while armed, something that a user might have written behind it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class AfterNorm(nn.Module):
    """Stands in for a norm: passes its result on, through `fault` while armed, or its `right` form once `mended`."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.armed = self.mended = False

    @property
    def weight(self) -> Tensor:
        weight = self.norm.weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if not self.armed:
            return x
        return self.right(x) if self.mended else self.fault(x)

    def fault(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def right(self, x: Tensor) -> Tensor:
        """What the fault was meant to compute; the same where it is right in float32."""
        return self.fault(x)


def without_first_row(x: Tensor) -> Tensor:
    """``x`` with zeros in the first row of the first sample, still part of the graph."""
    keep = torch.ones(x.shape[:-1], dtype=x.dtype)
    keep[0, 0] = 0
    return x * keep.unsqueeze(-1)


class RootOfZero(AfterNorm):
    """Another norm, without eps: 1 / sqrt(0)."""

    def fault(self, x: Tensor) -> Tensor:
        x = without_first_row(x)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))

    def right(self, x: Tensor) -> Tensor:
        x = without_first_row(x)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class RootGradientAtZero(AfterNorm):
    """The eps stands outside the root: finite at zero, but its slope there is not."""

    def fault(self, x: Tensor) -> Tensor:
        x = without_first_row(x)
        return x / (x.pow(2).sum(-1, keepdim=True).sqrt() + 1e-3)

    def right(self, x: Tensor) -> Tensor:
        x = without_first_row(x)
        return x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()


class LostEpsilon(AfterNorm):
    """The eps of 1e-8 is zero in half precision: 0 / 0."""

    def fault(self, x: Tensor) -> Tensor:
        x = without_first_row(x).half()
        return x / (x.abs().mean(-1, keepdim=True) + 1e-8)


class LiteralMask(AfterNorm):
    """Mixes tokens under a mask made with -1e9, which half precision does not hold; one sample is padding only."""

    def fault(self, x: Tensor) -> Tensor:
        half = x.half()
        keep = torch.ones(half.shape[:-1], dtype=half.dtype).unsqueeze(-2)
        keep[0] = 0
        scores = half @ half.transpose(-1, -2) + (1.0 - keep) * -1e9
        return scores.softmax(-1) @ half


class Square(AfterNorm):
    """Squares numbers of about a thousand in half precision."""

    def fault(self, x: Tensor) -> Tensor:
        return (x.half() * 1024).square()


class GuardedSquare(AfterNorm):
    """Squares likewise, and has what overflowed be zero."""

    def fault(self, x: Tensor) -> Tensor:
        return torch.nan_to_num((x.half() * 1024).square(), posinf=0.0) / 2**20


class PhaseTransform(AfterNorm):
    """Keeps the phases of a spectrum and divides its magnitudes out, which silence has none of: complex 0 / 0."""

    def fault(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(without_first_row(x).float())
        return torch.fft.irfft(spectrum / spectrum.abs(), n=x.shape[-1])

    def right(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(without_first_row(x).float())
        return torch.fft.irfft(spectrum / spectrum.abs().clamp_min(1e-6), n=x.shape[-1])


class LostSquares(AfterNorm):
    """Brings small numbers to length one; half precision has zeros for their squares: x / 0."""

    def fault(self, x: Tensor) -> Tensor:
        small = (x * 1e-4).half()
        return small / small.square().mean(-1, keepdim=True).sqrt()


class LostProbability(AfterNorm):
    """Adds the entropy of a choice; half precision has rounded some of its probabilities to zero: 0 * log(0)."""

    def fault(self, x: Tensor) -> Tensor:
        chosen = (x * 8).softmax(-1).half()
        return x - (chosen * chosen.log()).sum(-1, keepdim=True)


class LoudSpectrum(AfterNorm):
    """Hands the two parts of a spectrum on in half precision, which do not fit."""

    def fault(self, x: Tensor) -> Tensor:
        parts = torch.view_as_real(torch.fft.rfft(x.float() * 2.0**15))
        return x + parts.half().sum((-1, -2), keepdim=True)[..., 0]


class Shift(AfterNorm):
    """Adds a buffer, as a running mean is."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__(norm)
        self.register_buffer("offset", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.offset


class BitFlip(AfterNorm):
    """Flips one bit of one number of the norm's result, once, where torch does not see it.

    The number is between 1 and 2, so that its exponent is all ones afterwards. The ``strike`` is an iterator, which
    nobody can set back: hardware does not do the same again because a step is run again.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__(norm)
        self.strike: Iterator[bool] = iter((True,))

    def fault(self, x: Tensor) -> Tensor:
        if next(self.strike, False):
            numbers = x.detach().numpy()
            bits = numbers.view("int32").reshape(-1)
            between = (abs(numbers) > 1) & (abs(numbers) < 2)
            bits[between.reshape(-1).argmax()] ^= 1 << 30
        return x
