"""Statistics of one tensor: a light pass without a sync while training, a full one in replays."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Elements looked at for zeros, subnormals and the exponent histogram; larger tensors are strided down to this.
SAMPLE = 1 << 12
#: Dtypes whose values are looked at; torch cannot yet take the minimum of an 8-bit float.
MEASURED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_CHUNK = 512


class Stats(NamedTuple):
    """What a trace row says of a tensor's values; None where it was not measured."""

    min: float | None = None
    max: float | None = None
    nan: int | None = None
    posinf: int | None = None
    neginf: int | None = None
    zeros: int | None = None
    subnormals: int | None = None
    max_finite: float | None = None
    min_positive: float | None = None
    exp_low: int | None = None
    exp_counts: tuple[int, ...] | None = None

    @property
    def finite(self) -> bool | None:
        """Whether every element is finite; None when not measured."""
        if self.min is None or self.max is None:
            return None
        return math.isfinite(self.min) and math.isfinite(self.max)


UNMEASURED = Stats()


def measurable(tensor: Tensor) -> bool:
    """Whether a tensor has floating values that can be looked at."""
    return tensor.dtype in MEASURED and tensor.layout is torch.strided and tensor.numel() > 0 and not tensor.is_meta


class Slots:
    """Preallocated places on the device for the min and max of many tensors; `read` copies all out at once."""

    def __init__(self) -> None:
        self._banks: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        self._free: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        self._used: list[tuple[tuple[torch.device, torch.dtype], int]] = []
        self._counts: dict[tuple[torch.device, torch.dtype], int] = {}

    def measure(self, tensor: Tensor) -> int:
        """Writes the NaN-propagating min and max of ``tensor`` into the next slot and returns its number."""
        key = (tensor.device, tensor.dtype)
        free = self._free.get(key)
        if not free:
            free = self._grow(key)
        torch.aminmax(tensor.detach(), out=free.pop())
        count = self._counts.get(key, 0)
        self._counts[key] = count + 1
        self._used.append((key, count))
        return len(self._used) - 1

    def read(self) -> list[Stats]:
        """The statistics of every slot in use, in order; waits for the device."""
        values = {key: torch.cat(banks).tolist() for key, banks in self._banks.items()}
        return [Stats(*values[key][index]) for key, index in self._used]

    def _grow(self, key: tuple[torch.device, torch.dtype]) -> list[tuple[Tensor, Tensor]]:
        device, dtype = key
        bank = torch.zeros(_CHUNK, 2, device=device, dtype=dtype)
        self._banks.setdefault(key, []).append(bank)
        low, high = bank.unbind(1)
        self._free[key] = list(zip(low.unbind(), high.unbind(), strict=True))[::-1]
        return self._free[key]


def full(tensor: Tensor, *, exact: bool = False) -> Stats:
    """Every statistic of ``tensor``, now; waits for the device.

    Min, max and the counts of non-finite elements are exact. Zeros, subnormals and the exponent histogram come from
    at most `SAMPLE` evenly spaced elements, scaled up to the tensor's size, unless ``exact``.
    """
    tensor = tensor.detach()
    low, high = (float(value) for value in torch.aminmax(tensor))
    finite = math.isfinite(low) and math.isfinite(high)
    nan, posinf, neginf = (0, 0, 0) if finite else _count_nonfinite(tensor)
    sample = _sample(tensor, exact)
    shape = _exponents(sample, tensor.numel() / max(1, sample.numel()), tensor.dtype)
    largest = max(abs(low), abs(high)) if finite else _largest_finite(tensor)
    return Stats(low, high, nan, posinf, neginf, max_finite=largest, **shape)


def _count_nonfinite(tensor: Tensor) -> tuple[int, int, int]:
    counts = torch.stack([tensor.isnan().sum(), tensor.isposinf().sum(), tensor.isneginf().sum()])
    nan, posinf, neginf = counts.tolist()
    return nan, posinf, neginf


def _largest_finite(tensor: Tensor) -> float | None:
    magnitudes = tensor[tensor.isfinite()].abs()
    return float(magnitudes.max()) if magnitudes.numel() else None


def _sample(tensor: Tensor, exact: bool) -> Tensor:
    """A flat double-precision selection of the elements of ``tensor`` on the host."""
    stride = 1 if exact else max(1, tensor.numel() // SAMPLE)
    flat = tensor.reshape(-1) if tensor.is_contiguous() or stride == 1 else tensor.flatten()
    return flat[::stride].to("cpu", torch.float64)


def _exponents(sample: Tensor, weight: float, dtype: torch.dtype) -> dict[str, Any]:
    magnitudes = sample[sample.isfinite()].abs()
    positive = magnitudes[magnitudes > 0]
    counts: dict[str, Any] = {
        "zeros": round((magnitudes.numel() - positive.numel()) * weight),
        "subnormals": round(int((positive < torch.finfo(dtype).tiny).sum()) * weight),
    }
    if positive.numel():
        exponents = torch.frexp(positive).exponent.to(torch.int64) - 1
        lowest = int(exponents.min())
        bins = torch.bincount(exponents - lowest).tolist()
        counts |= {"min_positive": float(positive.min()), "exp_low": lowest}
        counts["exp_counts"] = tuple(round(count * weight) for count in bins)
    return counts
