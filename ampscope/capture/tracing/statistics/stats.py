"""Statistics of tensors: what a trace says of one, and a light pass without a sync for the steps of the training."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.torch_support.local_shards import PLAIN, has_arrived, local
from ampscope.capture.torch_support.tensor_tree import inner_tensors
from ampscope.capture.tracing.statistics.tensor_values import MEASURED, in_memory_order, numbers, stored
from ampscope.trace.dtypes import FINFO
from ampscope.trace.schema import Statistics

#: Largest finite magnitude that a trace can say.
LARGEST = FINFO["float32"].max
_CHUNK = 128


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
    """What was measured, as a trace keeps it: in float32, where a finite number stays finite, however large."""
    if seen.min is None or seen.max is None or not (seen.min < -LARGEST or seen.max > LARGEST):
        return seen
    low, high, most = map(_within, (seen.min, seen.max, seen.max_finite))
    return seen._replace(min=low, max=high, max_finite=most)


def _within(value: float | None) -> float | None:
    return math.copysign(LARGEST, value) if value is not None and LARGEST < abs(value) < math.inf else value


class Slots:
    """Preallocated places on the device for the min and max of many tensors; `read` copies all out at once.

    They serve one step after another: making them takes longer than what is written there.
    """

    def __init__(self) -> None:
        self._banks: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        self._places: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        self._used: list[tuple[tuple[torch.device, torch.dtype], int]] = []
        self._counts: dict[tuple[torch.device, torch.dtype], int] = {}

    def measure(self, tensor: Tensor) -> int:
        """Writes the NaN-propagating min and max of a measurable tensor into the next slot and returns its number."""
        values = in_memory_order(numbers(tensor.detach() if tensor.requires_grad else tensor))
        key = (values.device, values.dtype)
        count = self._counts.get(key, 0)
        places = self._places.get(key, ())
        if count == len(places):
            places = self._grow(key)
        torch.aminmax(values, out=places[count])
        self._counts[key] = count + 1
        self._used.append((key, count))
        return len(self._used) - 1

    def read(self) -> list[Statistics]:
        """The statistics of every slot in use, in order; waits for the device."""
        values = {key: self._written(key) for key, count in self._counts.items() if count}
        return [Statistics(*values[key][index]) for key, index in self._used]

    def restart(self) -> None:
        """Gives every place free again."""
        self._used.clear()
        self._counts.clear()

    def _written(self, key: tuple[torch.device, torch.dtype]) -> Any:
        count = self._counts[key]
        banks = self._banks[key][: -(-count // _CHUNK)]
        return torch.cat(banks)[:count].double().tolist()

    def _grow(self, key: tuple[torch.device, torch.dtype]) -> list[tuple[Tensor, Tensor]]:
        device, dtype = key
        with torch.inference_mode(mode=False):  # else nothing could be written outside of that mode later
            bank = torch.zeros(_CHUNK, 2, device=device, dtype=dtype)
        self._banks.setdefault(key, []).append(bank)
        low, high = bank.unbind(1)
        places = self._places.setdefault(key, [])
        places += zip(low.unbind(), high.unbind(), strict=True)
        return places
