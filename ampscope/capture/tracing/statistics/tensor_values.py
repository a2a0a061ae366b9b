"""The numbers that a tensor holds, as torch can measure them: of complex, 8-bit, sparse and nested tensors too."""

from __future__ import annotations

import torch
from torch import Tensor

from ampscope.capture.torch_support.dtypes import torch_dtype
from ampscope.trace.dtypes import FINFO

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
