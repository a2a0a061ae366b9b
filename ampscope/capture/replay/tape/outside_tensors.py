"""Keeps what taped calls read from outside as it was when they read it, though the loop writes into it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

import torch
from torch import Tensor, nn

from ampscope.capture.replay.tape.entry import Entry, OutsideTensor
from ampscope.capture.torch_support.torch_private import storage_key, version_counter

#: Elements up to which a tensor from outside is copied before the loop overwrites it.
SMALL_TARGET = 1 << 20
_PLAIN = (Tensor, nn.Parameter)


class OutsideTensors:
    """The tensors from outside that a tape refers to, by the memory they live in.

    Attributes:
        moved: Leaves that the calls write by themselves, by ``id``.
    """

    def __init__(self) -> None:
        self.moved: Container[int] = ()
        self._by_memory: dict[int, list[OutsideTensor]] = {}

    def refer(self, tensor: Tensor, original: Tensor | None) -> OutsideTensor:
        """A reference to a tensor that no entry made.

        Args:
            tensor: What a call was given.
            original: A copy of it as it was before the call overwrote it; None where it does not.
        """
        identity = id(tensor)
        if original is not None:
            return OutsideTensor(original, version_counter(original), identity)
        if tensor.requires_grad:  # weights, mostly: autograd would not let the loop write into them unseen
            return OutsideTensor(tensor, version_counter(tensor), identity)
        if not tensor.dim() and tensor.layout is torch.strided:
            tensor = tensor.clone()  # a number such as the loss scale: kept by value, for whoever writes into it next
            return OutsideTensor(tensor, version_counter(tensor), identity)
        reference = OutsideTensor(tensor, version_counter(tensor), identity)
        if _is_plain(tensor):
            self._by_memory.setdefault(storage_key(tensor), []).append(reference)
        return reference

    def copied_before_write(self, targets: Iterable[Tensor], unknown: Callable[[Tensor], bool]) -> dict[int, Tensor]:
        """Copies of small tensors from outside that are about to be overwritten, by ``id``.

        What earlier calls have read of the same memory refers to copies from now on: a replay reads there what they
        read. One copy for each tensor, so that what shared memory in the step shares it in a replay.

        Args:
            targets: The tensors that a function is about to write.
            unknown: Whether no entry has made or written a tensor, and it is to be copied therefore.
        """
        copies: dict[int, Tensor] = {}
        for tensor in targets:
            if not tensor.requires_grad and tensor.numel() <= SMALL_TARGET and unknown(tensor):
                copies[id(tensor)] = tensor.detach().clone()
            if self._by_memory and _is_plain(tensor):
                for reference in self._by_memory.pop(storage_key(tensor), ()):
                    _keep(reference, copies)
        return copies

    def forget_but(self, entries: Iterable[Entry]) -> None:
        """Forgets all references but those of ``entries``."""
        self._by_memory.clear()
        for entry in entries:
            for reference in entry.arguments.outside:
                if id(reference.tensor) == reference.identity and _is_plain(reference.tensor):
                    self._by_memory.setdefault(storage_key(reference.tensor), []).append(reference)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor lives in memory of its own kind, and autograd would not let the loop write into it unseen."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.requires_grad


def _keep(reference: OutsideTensor, copies: dict[int, Tensor]) -> None:
    """Lets a reference to what is about to be overwritten refer to a copy, which may be among ``copies``."""
    read = reference.tensor
    if version_counter(read) != reference.version or read.numel() > SMALL_TARGET:
        return
    kept = copies.get(reference.identity)
    if kept is None:
        kept = copies[reference.identity] = read.detach().clone()
    reference.tensor, reference.version = kept, version_counter(kept)
