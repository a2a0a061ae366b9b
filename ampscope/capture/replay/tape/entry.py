"""One call on the step tape: what was called, on which arguments and in which state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.replay.tape.framework_flags import Flag
from ampscope.capture.replay.tape.reception import Reception
from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.calls.call_state import Ambient
from ampscope.capture.torch_support.calls.kernel_choice import KernelChoice
from ampscope.capture.torch_support.calls.random_state import RandomState
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.torch_support.user_line import Place


class EntryKind(Enum):
    """The kinds of things that an entry calls."""

    MODULE = auto()
    FUNCTION = auto()
    BACKWARD = auto()


class TensorReference:
    """Stands for a tensor among an entry's arguments."""

    __slots__ = ()


@dataclass(slots=True)
class EarlierResult(TensorReference):
    """A tensor that an earlier entry returned."""

    entry: int
    leaf: int


@dataclass(slots=True)
class OutsideTensor(TensorReference):
    """A tensor that came from outside the tape: a batch, a target, a parameter used in the loss."""

    tensor: Tensor
    version: int
    identity: int  #: ``id`` of the tensor the call was given; ``tensor`` may be a copy of it


@dataclass(slots=True)
class GradientOf(TensorReference):
    """The gradient that a parameter has when the call comes."""

    parameter: int  #: its ``id``


@dataclass(slots=True)
class Arguments:
    """The arguments of a call, with a reference in the place of each tensor."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[TensorReference]  #: those references, in order

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any], refer: Callable[[Tensor], TensorReference]) -> Arguments:
        """The arguments with ``refer(tensor)`` in the place of every tensor."""
        references: list[TensorReference] = []

        def replaced(tensor: Tensor) -> TensorReference:
            references.append(refer(tensor))
            return references[-1]

        args, kwargs = tensor_tree.rebuild((args, kwargs), replaced)
        return Arguments(args, kwargs, references)

    @property
    def earlier(self) -> list[EarlierResult]:
        """The tensors among them that earlier entries returned."""
        return [reference for reference in self.tensors if isinstance(reference, EarlierResult)]

    @property
    def outside(self) -> list[OutsideTensor]:
        """The tensors among them that came from outside the tape."""
        return [reference for reference in self.tensors if isinstance(reference, OutsideTensor)]

    @property
    def devices(self) -> set[torch.device]:
        """Returns the devices of those tensors that came from outside the tape."""
        return {each.tensor.device for each in self.tensors if isinstance(each, OutsideTensor)}

    def resolved(self, tensor_of: Callable[[Any], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with ``tensor_of(reference)`` in the place of every reference."""
        args, kwargs = tensor_tree.rebuild((self.args, self.kwargs), tensor_of, TensorReference)
        return args, kwargs


@dataclass(slots=True)
class UnscaledGradients(Arguments):
    """The gradients that ``scaler.unscale_`` divides by the loss scale: looked up when they are asked for."""

    optimizer: Optimizer
    scale: Tensor
    known: Container[int]  #: ``id`` of the parameters whose gradients a replay has

    def resolved(self, tensor_of: Callable[[Any], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See `Arguments.resolved`; without gradients that no backward of the replay has left."""
        found = []
        for parameter in OptimizerView(self.optimizer).parameters:
            with contextlib.suppress(NoGradientError):
                found += [tensor_of(GradientOf(id(parameter)))] if id(parameter) in self.known else []
        return (found, self.scale), {}


class NoGradientError(RuntimeError):
    """A replay has no gradient of a parameter that the real step had one of."""


@dataclass(slots=True)
class CallState:
    """The state around a call that decides its numbers."""

    ambient: Ambient
    autocast_epoch: int  #: which cache of cast weights it used
    random: RandomState | None = None  #: where the call may draw
    training: list[bool] = field(default_factory=list)  #: ``training`` of each watched module, at a module's call
    kernels: KernelChoice | None = None  #: where it chooses between kernels
    flags: tuple[Flag, ...] = ()  #: what a framework had noted about a backward


@dataclass(slots=True)
class CalledThrough:
    """The function that calls a module in the loop's place: a transform of torch.func, or ``functional_call``."""

    call: Callable[..., Any]
    inputs: slice  #: of the positional arguments: what the loop gave is among them
    lends: bool  #: the second argument holds weights that take the place of the module's own
    reads: dict[int, EarlierResult] = field(default_factory=dict)  #: besides the arguments, by ``id`` in the real step
    leaves: dict[str, int] = field(default_factory=dict)  #: which of its results are gradients of which parameters
    value: Tensor | None = None  #: what those are gradients of, where it returned that too


@dataclass(slots=True)
class Entry:
    """One call; many attributes because each is a part of what it takes to make it again, or to check that it was."""

    kind: EntryKind
    call: Callable[..., Any]
    arguments: Arguments
    state: CallState
    place: Place
    versions: list[int] = field(default_factory=list)  #: change counters of a module's weights
    fingerprint: list[Tensor] = field(default_factory=list)  #: of what a module returned, of what a backward began from
    gives: int = 0  #: how many tensors a module returned, one or a tuple of them; 0 for anything else
    in_place: bool = False
    also_writes: list[EarlierResult] = field(default_factory=list)  #: those that share the memory it overwrites
    scales: bool = False  #: it multiplies a loss with the loss scale
    begins_afresh: bool = False  #: a backward: the loop has taken all gradients away that an earlier one had left
    received: list[Reception] = field(default_factory=list)  #: what its collectives brought, in order
    overwritten: list[tuple[Tensor, Tensor]] = field(default_factory=list)  #: buffers, and what another rank gave them
    through: CalledThrough | None = None  #: what calls the module in the loop's place, with ``arguments``
    synchronised_by: nn.Module | None = None  #: the wrapper that reduces the gradients of a module's call across ranks

    @property
    def module(self) -> nn.Module:
        """The module that a MODULE entry calls."""
        assert isinstance(self.call, nn.Module)
        return self.call

    @property
    def earlier(self) -> list[EarlierResult]:
        """The results of earlier entries that this one reads."""
        return [*self.arguments.earlier, *(self.through.reads.values() if self.through is not None else ())]

    @property
    def is_training_call(self) -> bool:
        """Whether it is a module's call that autograd follows."""
        return self.kind is EntryKind.MODULE and self.state.ambient.grad


def unscale_(gradients: list[Tensor], scale: Tensor) -> None:
    """Does what ``scaler.unscale_`` does to gradients that are finite; its look at them changes nothing."""
    inverse = scale.float().reciprocal()
    for gradient in gradients:
        (gradient._values() if gradient.is_sparse else gradient).mul_(inverse.to(gradient.device))
