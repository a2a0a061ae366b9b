"""Statistics of tensors: what a trace says of one, and a light pass without a sync for the steps of the training."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ampscope.capture.torch_support.dtypes import torch_dtype
from ampscope.capture.torch_support.local_shards import has_arrived, local
from ampscope.trace.dtypes import FINFO
from ampscope.trace.schema import Statistics

#: Dtypes whose values are looked at; torch cannot yet take the minimum of an 8-bit float.
MEASURED = frozenset(torch_dtype(name) for name, info in FINFO.items() if info.bytes > 1)
_CHUNK = 128


def measurable(tensor: Tensor) -> bool:
    """Whether a tensor has floating values that can be looked at."""
    dense = tensor.layout is torch.strided and not tensor.is_meta and has_arrived(tensor)
    return dense and tensor.dtype in MEASURED and tensor.numel() > 0


def finite(tensor: Tensor) -> bool:
    """Whether every element that lies on this rank is finite; waits for the device."""
    values = tensor._values() if tensor.layout is torch.sparse_coo else local(tensor)
    if measurable(values):  # the extremes show it, ten times faster on a CPU than a look at each element
        low, high = torch.stack(torch.aminmax(values.detach())).tolist()
        return math.isfinite(low) and math.isfinite(high)
    return not values.is_floating_point() or not has_arrived(values) or bool(values.isfinite().all())


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
        torch.aminmax(tensor.detach() if tensor.requires_grad else tensor, out=free.pop())
        count = self._counts.get(key, 0)
        self._counts[key] = count + 1
        self._used.append((key, count))
        return len(self._used) - 1

    def read(self) -> list[Statistics]:
        """The statistics of every slot in use, in order; waits for the device."""
        values = {key: torch.cat(banks)[: self._counts[key]].double().tolist() for key, banks in self._banks.items()}
        return [Statistics(*values[key][index]) for key, index in self._used]

    def _grow(self, key: tuple[torch.device, torch.dtype]) -> list[tuple[Tensor, Tensor]]:
        device, dtype = key
        with torch.inference_mode(mode=False):  # else nothing could be written outside of that mode later
            bank = torch.zeros(_CHUNK, 2, device=device, dtype=dtype)
        self._banks.setdefault(key, []).append(bank)
        low, high = bank.unbind(1)
        self._free[key] = list(zip(low.unbind(), high.unbind(), strict=True))[::-1]
        return self._free[key]
