"""A write into the weights ends an evaluation: forwards and backwards on one set of weights."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.function_names import targets, writes_values
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.process_group import collectives_so_far
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
        return [weight for weight in map(self._weight, targets(args, kwargs)) if weight is not None]

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


#: Calls without a backward, and micro-batches without an optimizer step, whose inputs are kept alive.
MOST_CALLS = 64


@dataclass(slots=True)
class Evaluation:
    """Holds what is known of the present evaluation; most steps are made of one.

    A step that moves weights and calls the model again (SAM, LBFGS) has several, and each is judged before its weights
    move: nothing of it could be run again afterwards.
    """

    since: int  #: position on the tape where it begins
    earlier: bool = False  #: the step had another before it
    after_unjudged: bool = False  #: weights were moved in this step before AMPscope could look at what moved them
    had_gradients: frozenset[str] = frozenset()  #: parameters that had one before its first backward
    wrapped: bool = False  #: a call of it ran in a wrapper that reduces gradients by itself
    collectives: int | None = 0  #: that had run before its first backward; None: not known
    calls: int = 0  #: of watched modules since the last backward
    backwards: int = 0
    moved: bool = False  #: the weights have been moved since: the next call begins another evaluation
    updates: list[Update] = field(
        default_factory=list
    )  #: by which the loop is about to move weights, while it is judged
    judged: bool = False  #: its gradients were looked at while its weights were still there
    versions: dict[int, list[int]] = field(default_factory=dict)  #: module -> counters of its weights after its call

    def takes_call(self) -> bool:
        """Counts a call of a watched module; returns whether its inputs can be kept beside those of the others."""
        self.calls += 1
        fits = max(self.calls, self.backwards) <= MOST_CALLS
        self.calls = self.calls if fits else 0
        return fits

    def backward_begins(self, models: Models) -> bool:
        """Notes what is there before a backward; returns whether it is not what an earlier one has left."""
        held = (name for name, parameter in models.parameters.values() if parameter.grad is not None)
        if self.backwards:
            return next(held, None) is None
        self.had_gradients, self.collectives = frozenset(held), self.collectives_now()
        return False

    def collectives_now(self) -> int | None:
        """How many have run; not asked where a wrapper is known to reduce gradients, for asking takes its time."""
        return 0 if self.wrapped else collectives_so_far()

    def collectives_run(self) -> int | None:
        """How many have run since its first backward began; None: not known."""
        now = self.collectives_now()
        return now - self.collectives if now is not None and self.collectives is not None else None

    def another(self, since: int) -> Evaluation:
        """The evaluation of the same step that begins at ``since``, on other weights."""
        return Evaluation(since, earlier=True, after_unjudged=self.after_unjudged or not self.judged)
