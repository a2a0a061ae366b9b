"""Recognises what writes into the weights of a step: a torch function of the loop's, before it runs, and forward."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.calls.function_names import writes_values
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.readback import Parcel

#: Functions after which a weight is not finite where what it was given is not: sums, products and copies.
_GIVES = frozenset({"add", "iadd", "sub", "isub", "mul", "imul", "lerp", "copy", "set", "setitem"})
_COPIES = frozenset(("copy_", "_foreach_copy_", "__set__", "set_"))
#: Why a step is not run again whose forward pass does that.
IN_FORWARD = "a parameter is changed inside the forward pass"


class Update(NamedTuple):
    """A tensor that the loop is about to give to one weight."""

    name: str  #: of the weight
    tensor: Tensor


class WrittenValues(NamedTuple):
    """The tensors with which weights are written."""

    operands: list[Tensor]
    are_copied: bool  #: as they are; nothing is computed with them


class WeightWrites:
    """The weights of the models, found by themselves and through aliases of their memory (``weight.data``).

    Args:
        models: The watched models.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._memory: dict[int, Tensor] | None = None

    def forget(self) -> None:
        """Weights may have other memory from now on."""
        self._memory = None

    def written(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The trainable weights that a call of ``func`` is about to write; none for most functions."""
        if not writes_values(func, kwargs):
            return []
        targets = tensor_tree.tensors(kwargs.get("out", args[0] if args else None))
        return [weight for weight in map(self._weight, targets) if weight is not None]

    def updates(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], weights: list[Tensor]
    ) -> Iterator[Update]:
        """Yields what a call gives to the ``weights`` that it writes; of lists, each tensor to the weight in its place.

        A function that may make finite weights of a bad tensor, as one that divides by it does, gives nothing.
        """
        if getattr(func, "__name__", "").strip("_").removeprefix("foreach_") not in _GIVES:
            return
        names = [self._models.parameters[id(weight)][0] for weight in weights]
        for value in (*args[1:], *kwargs.values()):
            found = list(tensor_tree.tensors(value))
            of = names if len(found) == len(names) else names[:1] * len(found)
            yield from (Update(name, tensor) for name, tensor in zip(of, found, strict=True))

    def values(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> WrittenValues:
        """Returns the tensors with which a call of ``func`` is about to write weights."""
        operands = list(tensor_tree.tensors((args[1:], kwargs)))
        return WrittenValues(operands, getattr(func, "__name__", "") in _COPIES)

    def _weight(self, tensor: Tensor) -> Tensor | None:
        known = self._models.parameters.get(id(tensor))
        if known is None and self._models.stand_ins.take_up([tensor]):
            known = self._models.parameters[id(tensor)]
        if known is not None:
            return tensor if tensor.requires_grad else None
        if tensor.grad_fn is not None:
            return None
        owner = self._owner(tensor)
        return self._owner(tensor._base) if owner is None and tensor._base is not None else owner

    def _owner(self, tensor: Tensor) -> Tensor | None:
        """The weight whose memory begins where that of ``tensor`` does."""
        if self._memory is None:
            weights = (weight for _, weight in self._models.parameters.values() if weight.requires_grad)
            self._memory = {weight.data_ptr(): weight for weight in weights if _has_address(weight)}
        return self._memory.get(tensor.data_ptr()) if _has_address(tensor) else None


class ForwardEdits:
    """Whether forward changes weights behind their change counters (``.data``), as norms before and after it tell.

    Args:
        models: The watched models.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._before: list[Tensor] | None = None
        self._sent: deque[Parcel] = deque()
        self._found = False

    def call_began(self, *, looks: bool) -> None:
        """The forward pass begins; ``looks``: at its weights."""
        self._before = self._models.weight_norms() if looks else None

    def call_ended(self) -> None:
        """Sends for what the norms were before a call and are after it."""
        if self._before is not None:
            norms = [*self._before, *self._models.weight_norms()]
            self._sent.append(Parcel({str(place): norm for place, norm in enumerate(norms)}))
        self._before = None

    def seen(self, *, wait: bool = False) -> bool:
        """Whether one did so, as far as the host knows."""
        while self._sent and (wait or self._sent[0].arrived):
            norms = [norm or 0.0 for norm in self._sent.popleft().values().values()]
            pairs = zip(norms[: len(norms) // 2], norms[len(norms) // 2 :], strict=True)
            self._found |= any(now != before and not math.isnan(now) for before, now in pairs)
        return self._found


def _has_address(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and tensor.device.type != "meta" and tensor.numel() > 0
