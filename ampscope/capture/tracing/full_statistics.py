"""A replay takes every statistic of many tensors: exact where one pass does it, from a sample where it takes more."""

from __future__ import annotations

import importlib.util
import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.torch_support.tensor_tree import torch_dtype
from ampscope.capture.tracing import light_statistics
from ampscope.capture.tracing.exponent_histogram import ExponentHistogram, Samples, width
from ampscope.capture.tracing.light_statistics import numbers
from ampscope.trace.dtypes import FINFO, FloatInfo
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
        from ampscope.capture.tracing.fused_kernel import KERNEL  # only where there is Triton

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


#: Tensors sampled before their histograms are made.
_TENSORS = 1 << 8
#: Whether a GPU's tensors are looked at by one kernel of AMPscope's own instead of torch's, where it can be built.
#: `make gpu-check` measures both; no GPU has been asked yet.
FUSED = False
#: Elements whose bits are looked at together.
_CHUNK = 1 << 24


class _Bits(NamedTuple):
    """The integers of a dtype's width, by which the bits of its numbers are told apart."""

    integer: torch.dtype
    largest: int  #: all bits but the sign
    infinity: int


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(info: FloatInfo) -> _Bits:
    integer = _INTEGERS[info.bytes]
    infinity = (info.top - info.normal + 1) << info.mantissa_bits  # all exponent bits set
    return _Bits(integer, torch.iinfo(integer).max, infinity)


_LAYOUTS = {torch_dtype(name): _bits(info) for name, info in FINFO.items() if info.bytes in _INTEGERS}


class PendingStatistics(NamedTuple):
    """A reference to a tensor's statistics that lie on the device and are read later."""

    fused: FusedLook
    number: int


class Census:
    """Measures one tensor after another, and has their statistics when it has seen all.

    Min, max and the counts of non-finite elements are exact. Zeros, subnormals and the exponent histogram come from
    at most `SAMPLE` evenly spaced elements, scaled up to the tensor's size. Keeps a sample of each, no tensor. Of
    complex numbers, extremes and the histogram are of their parts; elements are counted whole, and zeros exactly.
    """

    def __init__(self) -> None:
        self._pairs: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._samples: dict[tuple[torch.device, torch.dtype], Samples] = {}
        self._extremes: list[Statistics | PendingStatistics] = []
        self._fused: dict[torch.device, FusedLook | None] = {}
        self._shapes: dict[int, ExponentHistogram] = {}

    def measure(self, tensor: Tensor) -> int | None:
        """Looks at ``tensor`` and returns its number; waits for the device once, unless one kernel does it all.

        None for a tensor without values that can be looked at.
        """
        if not light_statistics.measurable(tensor):
            return None
        tensor = tensor.detach()
        values = numbers(tensor)
        number = len(self._extremes)
        fused = self._fused_look(values.device)
        if fused and not tensor.is_complex() and fused.accepts(values):
            self._extremes.append(PendingStatistics(fused, fused.look(values)))
        else:
            seen = self.look(values)
            self._extremes.append(_of_complex(tensor, seen) if tensor.is_complex() else seen)
        key = (values.device, width(values))
        samples = self._samples.get(key) or self._samples.setdefault(key, Samples(*key, _TENSORS))
        if samples.full:
            self._shapes |= samples.empty()
        samples.add(number, values, tensor)
        return number

    def read(self) -> list[Statistics]:
        """The statistics of every tensor measured, in order."""
        for samples in self._samples.values():
            self._shapes |= samples.empty()
        told = {fused: fused.read() for fused in self._fused.values() if fused}
        seen = [told[one.fused][one.number] if isinstance(one, PendingStatistics) else one for one in self._extremes]
        return [_together(one, self._shapes[number]) for number, one in enumerate(seen)]

    def _fused_look(self, device: torch.device) -> FusedLook | None:
        if device not in self._fused:
            self._fused[device] = FusedLook(device) if FUSED and device.type == "cuda" and has_triton() else None
        return self._fused[device]

    def look(self, tensor: Tensor) -> Statistics:
        """Returns a tensor's exact statistics: extremes, counts of non-finite elements, largest finite magnitude."""
        key = (tensor.device, tensor.dtype)
        if key not in self._pairs:
            with torch.inference_mode(mode=False):  # else nothing could be written outside of that mode later
                self._pairs[key] = torch.empty(2, device=tensor.device, dtype=tensor.dtype)
        torch.aminmax(tensor, out=self._pairs[key].unbind())
        low, high = map(float, self._pairs[key].tolist())
        if math.isfinite(low) and math.isfinite(high):
            return Statistics(low, high, 0, 0, 0, max_finite=max(abs(low), abs(high)))
        return _look_through(tensor, low, high)


def _of_complex(tensor: Tensor, parts: Statistics) -> Statistics:
    """Adapts the statistics of real and imaginary parts to whole complex elements: NaN counts before infinities."""
    seen = parts._replace(zeros=tensor.numel() - int(tensor.count_nonzero()))
    if seen.finite:
        return seen
    sides, nan = torch.view_as_real(tensor.resolve_conj()), tensor.isnan()
    positive, negative = (int(((sides == end).any(-1) & ~nan).sum()) for end in (math.inf, -math.inf))
    return seen._replace(nan=int(nan.sum()), posinf=positive, neginf=negative)


def _together(seen: Statistics, sampled: ExponentHistogram) -> Statistics:
    """Merges a tensor's exact statistics with those that its sample adds."""
    zeros = sampled.zeros if seen.zeros is None else seen.zeros
    return seen._replace(**sampled._replace(zeros=zeros)._asdict())


def _look_through(tensor: Tensor, low: float, high: float) -> Statistics:
    """Counts in a tensor that is not finite, by its bits: comparisons of half-precision numbers are slow on a CPU.

    Bits without the sign, moved up until infinity wraps around to the lowest integer, leave every finite magnitude at
    or above zero, in order, and put NaN below.
    """
    integer, largest, infinity = _LAYOUTS[tensor.dtype]
    shift, sign_only = largest - infinity + 1, torch.iinfo(integer).bits - 1
    tensor = tensor.resolve_neg()
    bad, top, infinite = 0, -1, False
    for part in (tensor,) if tensor.numel() <= _CHUNK else torch.split(tensor.reshape(-1), _CHUNK):
        moved = (part.view(integer) & largest).add_(shift)
        lowest, highest = torch.stack(torch.aminmax(moved)).tolist()
        infinite |= lowest == -largest - 1
        top = max(top, highest)
        bad += part.numel() if highest < 0 else -int((moved >> sign_only).sum(dtype=torch.int32))
    positive, negative = (int((tensor == end).sum()) if infinite else 0 for end in (math.inf, -math.inf))
    finite = float(torch.tensor(top - shift, dtype=integer).view(tensor.dtype)) if top >= 0 else None
    return Statistics(low, high, bad - positive - negative, positive, negative, max_finite=finite)
