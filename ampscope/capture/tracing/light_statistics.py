"""A tensor's extremes and its checksum are what a real step can afford: one pass, and no wait until they are read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ampscope.capture.torch_support.sharding import PLAIN, has_arrived, local
from ampscope.capture.torch_support.tensor_tree import inner_tensors, torch_dtype
from ampscope.trace.dtypes import FINFO
from ampscope.trace.schema import Statistics

_FLOATS = frozenset(torch_dtype(name) for name, info in FINFO.items() if info.bytes > 1)
#: Dtypes of real numbers that torch can take the minimum of.
_ORDERED = _FLOATS | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
#: Dtypes whose numbers another dtype holds exactly, and that dtype.
_WIDER = {
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2), torch.float16),
    **dict.fromkeys((torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), torch.float16),
    torch.float8_e8m0fnu: torch.float32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.float64,
}
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
#: Dtypes whose values are looked at; quantized ones and bits are not.
MEASURED = _ORDERED | _COMPLEX | frozenset(_WIDER)
_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


def stored(tensor: Tensor) -> Tensor:
    """The strided tensor in which a sparse or nested one keeps its values; any other tensor, as it is.

    Elements that a sparse tensor does not store are zeros, and are left out.
    """
    if tensor.layout is torch.strided:
        return tensor.values() if tensor.is_nested else tensor
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return tensor.values() if tensor.layout in _COMPRESSED else tensor


def numbers(tensor: Tensor) -> Tensor:
    """Returns the elements of a strided tensor of a `MEASURED` dtype as real numbers that have a minimum.

    The real and imaginary parts of complex numbers lie side by side in a last dimension of two.
    """
    if tensor.dtype in _ORDERED:
        return tensor
    if tensor.dtype in _COMPLEX:
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.to(_WIDER[tensor.dtype])


def in_memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor with its dimensions in the order in which they lie in memory; any other, as it is.

    For what is the same in any order: torch copies a ``channels_last`` tensor to find its least element.
    """
    if tensor.is_contiguous():
        return tensor
    strides = tensor.stride()
    ordered = tensor.permute(sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True))
    return ordered if ordered.is_contiguous() else tensor


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


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Elements up to which a tensor whose memory has gaps is copied for its sum.
_SMALL = 1 << 20
_WORD = 8


def checksum(tensor: Tensor) -> Tensor | None:
    """The sum of a tensor's bits, taken as integers, modulo ``2**64``; no wait.

    Two tensors of one shape and layout that differ in one element differ in it; the same elements in another order do
    not. Memory is read in words of 8 bytes, ten times faster than the least and greatest element are found.

    Args:
        tensor: Of any shape and dtype.

    Returns:
        A scalar (int64) on the tensor's device; None where there are no values to look at, or none without a copy of
        many.
    """
    tensor = stored(tensor.detach())
    if _is_in_words(tensor):
        return tensor.view(-1).view(torch.int64).sum()  # the stride of a dimension of one may be anything
    if not measurable(tensor):
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    dense = tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)
    if not dense and tensor.numel() > _SMALL:
        return None
    flat = tensor.as_strided((tensor.numel(),), (1,)) if dense else tensor.contiguous().view(-1)
    in_word = _WORD // flat.element_size()
    if not flat.storage_offset() % in_word and not flat.numel() % in_word:
        return flat.view(torch.int64).sum(dtype=torch.int64)
    head = min(-flat.storage_offset() % in_word, flat.numel())
    tail = flat.numel() - (flat.numel() - head) % in_word
    narrow = _INTEGERS[flat.element_size()]
    parts = [(flat[:head], narrow), (flat[head:tail], torch.int64), (flat[tail:], narrow)]
    sums = [part.view(dtype).sum(dtype=torch.int64) for part, dtype in parts if part.numel()]
    return sum(sums[1:], start=sums[0])


def _is_in_words(tensor: Tensor) -> bool:
    """Whether a tensor with values can be read as it is, in words; most can."""
    return (
        tensor.__class__ is Tensor
        and measurable(tensor)
        and tensor.is_contiguous()
        and tensor.dim() > 0
        and not tensor.is_complex()
        and not tensor.is_neg()
        and not tensor.shape[-1] * tensor.element_size() % _WORD
        and not tensor.storage_offset() * tensor.element_size() % _WORD
    )


def read_checksums(sums: Sequence[Tensor | None]) -> list[int | None]:
    """The numbers of checksums; waits for the devices."""
    found: list[int | None] = [None] * len(sums)
    for device in {each.device for each in sums if each is not None}:
        here = [(number, each) for number, each in enumerate(sums) if each is not None and each.device == device]
        values = torch.stack([each for _, each in here]).tolist()
        for (number, _), value in zip(here, values, strict=True):
            found[number] = value
    return found
