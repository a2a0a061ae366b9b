"""Tensors of a replay that are known by more than their values, while code hands them on."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from torch import Tensor

from ampscope.capture.replay.cures.forms.call_form import Call
from ampscope.capture.torch_support import torch_private

_Known = TypeVar("_Known")


class Followed(Generic[_Known]):
    """Remembers what is known of tensors, as long as nothing writes into them; keeps them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, _Known]] = {}

    def note(self, tensor: Any, known: _Known) -> None:
        """Something is known of what a call has returned."""
        if isinstance(tensor, Tensor):
            self._known[id(tensor)] = tensor, torch_private.version_counter(tensor), known

    def of(self, value: Any) -> _Known | None:
        """Returns what is known of a tensor; None of any other, and of one that was written into since."""
        tensor, version, known = self._known.get(id(value), (None, 0, None))
        return known if tensor is not None and torch_private.version_counter(tensor) == version else None

    def reads(self, call: Call) -> bool:
        """Whether a call is given a tensor of which something is known."""
        return any(self.of(value) is not None for value in (*call.args, *call.kwargs.values()))

    def items(self, call: Call) -> list[_Known | None]:
        """Returns what is known of each positional argument."""
        return [self.of(value) for value in call.args]

    def clear(self) -> None:
        """Lets go of all of them."""
        self._known.clear()
