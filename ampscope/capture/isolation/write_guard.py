"""Lets a replay compute with the training's own memory: what it writes there is put back, to the last bit.

A copy of the weights that a step does not train may not fit: they are nearly all of a model that is tuned by adapters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.dynamo import OwnMode
from ampscope.capture.torch_support.guard import surely
from ampscope.capture.torch_support.own_collectives import PLAIN
from ampscope.capture.tracing import operators
from ampscope.capture.tracing.operators import Operator
from ampscope.capture.tracing.running_code import FunctionWatch

#: Tensors up to this size are copied where nobody can see whether they are written into.
COPIED_BYTES = 64 << 20
#: They give away where memory lies: what writes there without torch (NumPy, a kernel of the user's) is not seen.
_GIVE_ADDRESSES = frozenset(
    {
        *(Tensor.data_ptr, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__),
        Tensor.__cuda_array_interface__.__get__,
    }
)


class AddressError(Exception):
    """Code of the user's was about to learn where memory lies that is too large to be copied, and could write there."""


class WriteGuard(OwnMode):
    """Active in a replay, below all that observes it: keeps what is about to be overwritten of the memory it guards.

    Args:
        draw: Runs an op that draws random numbers.
    """

    def __init__(self, draw: Callable[[Operator, Any, Any], Any] | None = None) -> None:
        super().__init__()
        self._draw = draw
        self._guarded: dict[int, Tensor] = {}  # by storage: what keeps the key its
        self._kept: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}  # by place in memory: it, and what it held
        self._whole: set[int] = set()  # storages of which all is kept

    def alias(self, tensor: Tensor) -> Tensor:
        """A leaf in the memory of ``tensor``, which is guarded from now on; its change counter is its own."""
        is_plain = type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
        alias = tensor.data if is_plain else tensor.detach()
        if tensor.layout is torch.strided:
            self._guarded.setdefault(torch_private.storage_key(tensor), alias)
        return alias

    @contextlib.contextmanager
    def active(self, functions: FunctionWatch) -> Iterator[None]:
        """Keeps what the body is about to overwrite.

        Args:
            functions: Tells of the functions that are called in it.
        """
        try:
            torch_private.insert_dispatch_mode(self)
            functions.listener = self._function_called
            yield
        finally:
            functions.listener = None
            surely(partial(torch_private.remove_dispatch_mode, self))

    @contextlib.contextmanager
    def putting_back(self) -> Iterator[None]:
        """Puts everything back when the body ends.

        The latest first: what was kept of a place later may be what was written there before.
        """
        try:
            yield
        finally:
            with torch.no_grad():
                for place, kept in reversed(self._kept.values()):
                    place.copy_(kept)
            self._kept.clear()
            self._whole.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not PLAIN.issuperset(types) and not torch_private.are_fake(types):
            return NotImplemented  # a wrapper subclass: its inner ops come by again
        operator = operators.describe(func)
        if operator.writes:
            for tensor in operators.written_tensors(operator, args, kwargs):
                self._keep(tensor)
        return self._draw(operator, args, kwargs) if operator.is_random and self._draw else func(*args, **kwargs)

    def _keep(self, tensor: Tensor) -> None:
        """Keeps what ``tensor`` holds, if its memory is guarded and nothing of just that place has been kept."""
        if tensor.layout is not torch.strided or (key := torch_private.storage_key(tensor)) not in self._guarded:
            return
        place = (key, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        if key in self._whole or place in self._kept:
            return
        with torch.no_grad():
            self._kept[place] = tensor.data, tensor.clone()
        if tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes():
            self._whole.add(key)

    def _function_called(self, func: Any, args: Any) -> None:
        """Keeps what lies where code of the user's is about to learn the address.

        Raises:
            AddressError: That is too much to keep.
        """
        if func not in _GIVE_ADDRESSES or args[0].layout is not torch.strided:
            return
        if args[0].nbytes <= COPIED_BYTES:
            self._keep(args[0])
        elif (key := torch_private.storage_key(args[0])) in self._guarded and key not in self._whole:
            name = func.__name__ if func.__name__ != "__get__" else "__cuda_array_interface__"
            raise AddressError(
                f"the step's code asks for the address ({name}) of a weight of more than {COPIED_BYTES >> 20} MiB, "
                "and what it writes there could not be put back"
            )
