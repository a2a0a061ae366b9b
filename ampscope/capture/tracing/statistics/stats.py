"""Statistics of tensors: what a trace says of one, and a light pass without a sync for the steps of the training."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ampscope.capture.torch_support.local_shards import PLAIN, has_arrived, local
from ampscope.capture.torch_support.tensor_tree import inner_tensors
from ampscope.capture.tracing.statistics.tensor_values import MEASURED, in_memory_order, numbers, stored
from ampscope.trace.dtypes import FINFO
from ampscope.trace.schema import Statistics

#: Largest finite magnitude that a trace can say.
LARGEST = FINFO["float32"].max
_CHUNK = 128
_NONE = np.empty((0, 2))


def measurable(tensor: Tensor) -> bool:
    """Whether a tensor has values that can be looked at; of a sparse or nested one, ask for what is `stored`."""
    if tensor.layout is not torch.strided or tensor.dtype not in MEASURED or tensor.is_meta or tensor.is_nested:
        return False
    if type(tensor) not in PLAIN and (not has_arrived(tensor) or inner_tensors(tensor)):
        return False
    return tensor.numel() > 0 and not tensor._is_zerotensor()


def can_be_bad(tensor: Tensor) -> bool:
    """Whether a tensor's dtype has values that are not finite."""
    return tensor.is_floating_point() or tensor.is_complex()


def may_turn_bad(tensor: Tensor) -> bool:
    """Whether a tensor has values that can be looked at and may not be finite."""
    return can_be_bad(tensor) and measurable(tensor)


def extremes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest number in a measurable tensor, NaN in both if any is NaN; no wait.

    Of complex numbers, those of the real and imaginary parts together.
    """
    low, high = torch.aminmax(in_memory_order(numbers(tensor.detach())))
    return low, high


def finite(tensor: Tensor) -> bool:
    """Whether every element that lies on this rank is finite; waits for the device."""
    inner = inner_tensors(tensor)
    if inner:
        return all(map(finite, inner))
    values = stored(local(tensor))
    if not can_be_bad(values):
        return True
    if measurable(values):  # the extremes show it, ten times faster on a CPU than a look at each element
        low, high = torch.stack(extremes(values)).tolist()
        return math.isfinite(low) and math.isfinite(high)
    return not has_arrived(values) or values.is_meta or bool(values.isfinite().all())


def recorded(seen: Statistics) -> Statistics:
    """Returns the statistics as a trace keeps them: in float32, with finite numbers kept finite, however large."""
    if seen.min is None or seen.max is None or not (seen.min < -LARGEST or seen.max > LARGEST):
        return seen
    low, high, most = map(_within, (seen.min, seen.max, seen.max_finite))
    return seen._replace(min=low, max=high, max_finite=most)


def recorded_spans(spans: NDArray[np.float64]) -> NDArray[np.float64]:
    """Brings many tensors' min and max, a row for each, into float32's range, as `recorded` does."""
    beyond = (np.abs(spans) > LARGEST) & np.isfinite(spans)
    return np.where(beyond, np.copysign(LARGEST, spans), spans) if beyond.any() else spans


def _within(value: float | None) -> float | None:
    return math.copysign(LARGEST, value) if value is not None and LARGEST < abs(value) < math.inf else value


class _Bank:
    """Places for the extremes of tensors of one dtype on one device."""

    __slots__ = ("_blocks", "_device", "_dtype", "count", "places")

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._blocks: list[Tensor] = []
        self.places: list[tuple[Tensor, Tensor]] = []
        self.count = 0  #: places in use

    def grow(self) -> None:
        """Makes more places."""
        with torch.inference_mode(mode=False):  # else nothing could be written outside of that mode later
            block = torch.zeros(_CHUNK, 2, device=self._device, dtype=self._dtype)
        self._blocks.append(block)
        low, high = block.unbind(1)
        self.places += zip(low.unbind(), high.unbind(), strict=True)

    def read(self) -> NDArray[np.float64]:
        """Returns all values written, a row of two for each place; waits for the device."""
        values: NDArray[np.float64]
        values = torch.cat(self._blocks[: -(-self.count // _CHUNK)])[: self.count].double().cpu().numpy()
        return values


class Slots:
    """Preallocated places on the device for the min and max of many tensors; `read` copies all out at once.

    They serve one step after another: making them takes longer than what is written there.
    """

    def __init__(self) -> None:
        self._banks: dict[tuple[torch.device, torch.dtype], _Bank] = {}
        self._on_host: dict[torch.dtype, _Bank] = {}  # of these, those of the host
        self._used: list[_Bank] = []  # by each measurement, in order
        self._spans = _NONE  # of those that were there when it was asked for last

    def measure(self, tensor: Tensor) -> int | None:
        """Writes the NaN-propagating min and max of a tensor into the next place and returns its number.

        None for a tensor without values that can be looked at.
        """
        bank = self._on_host.get(tensor.dtype)
        usual = (
            tensor.is_cpu
            and tensor.__class__ in PLAIN
            and tensor.layout is torch.strided
            and not tensor.is_nested
            and tensor.is_contiguous()
            and tensor.numel() > 0
            and not tensor._is_zerotensor()
        )
        if bank is None or not usual:  # most are measured as they are
            if not measurable(tensor):
                return None
            tensor = in_memory_order(numbers(tensor.detach()))
            bank = self._bank(tensor)
        elif tensor.requires_grad:
            tensor = tensor.detach()
        count = bank.count
        if count == len(bank.places):
            bank.grow()
        torch.aminmax(tensor, out=bank.places[count])
        bank.count = count + 1
        self._used.append(bank)
        return len(self._used) - 1

    def read(self) -> list[Statistics]:
        """The statistics of every place in use, in order of the measurements; waits for the device."""
        return [Statistics(low, high) for low, high in self.spans().tolist()]

    def spans(self) -> NDArray[np.float64]:
        """Returns the extremes as an array, a row of min and max for each tensor."""
        if len(self._spans) == len(self._used):
            return self._spans
        found = np.empty((len(self._used), 2))
        numbers = {bank: number for number, bank in enumerate(self._banks.values())}
        of = np.array([numbers[bank] for bank in self._used], np.intp)
        for bank, number in numbers.items():
            if bank.count:
                found[of == number] = bank.read()
        self._spans = found
        return found

    def restart(self) -> None:
        """Gives every place free again."""
        self._used.clear()
        self._spans = _NONE
        for bank in self._banks.values():
            bank.count = 0

    def _bank(self, values: Tensor) -> _Bank:
        key = (values.device, values.dtype)
        bank = self._banks.get(key)
        if bank is None:
            bank = self._banks[key] = _Bank(*key)
            if values.is_cpu:
                self._on_host[values.dtype] = bank
        return bank
