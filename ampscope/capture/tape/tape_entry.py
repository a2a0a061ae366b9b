"""An entry is one call on the step tape: what was called, on what, in which state, and what it received."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.tape.fingerprints import alike
from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.call_state import Ambient, KernelChoice, RandomState
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.torch_support.threads import Together
from ampscope.capture.torch_support.torch_private import version_counter
from ampscope.capture.torch_support.user_line import Place
from ampscope.capture.tracing.light_statistics import extremes, measurable

#: Modules and their flags. Fabric's hook on what its models return wants every backward to go through Fabric.
_FLAGS = (
    ("lightning.fabric.wrappers", "_in_fabric_backward"),
    ("lightning_fabric.wrappers", "_in_fabric_backward"),
)


class Flag(NamedTuple):
    """A flag that is set."""

    home: str
    name: str


def flags_raised() -> tuple[Flag, ...]:
    """The flags that are set now."""
    return tuple(Flag(*flag) for flag in _FLAGS if getattr(sys.modules.get(flag[0]), flag[1], False))


@contextlib.contextmanager
def flags_set(flags: tuple[Flag, ...]) -> Iterator[None]:
    """Sets ``flags`` for the body."""
    with contextlib.ExitStack() as stack:
        for flag in flags:
            stack.enter_context(_together(flag))
        yield


@cache
def _together(flag: Flag) -> Together:
    return Together(partial(_flag_set, flag))


@contextlib.contextmanager
def _flag_set(flag: Flag) -> Iterator[None]:
    home = sys.modules[flag.home]
    before = getattr(home, flag.name)
    setattr(home, flag.name, True)
    try:
        yield
    finally:
        setattr(home, flag.name, before)


#: Bytes of received tensors up to which they are copied: what the loop does with them afterwards takes nothing away.
COPIED_BYTES = 64 << 10

#: Why what the loop began and has not waited for cannot be used.
NOT_WAITED = "the loop has not waited for it"

#: Ops that send what they receive into, and those that send their second argument. What one rank alone sends is not
#: looked at: on the others it may be memory without values.
_SEND_FIRST = frozenset({"allreduce_", "reduce_"})
_SEND_SECOND = frozenset(
    {
        "allgather_",
        "_allgather_base_",
        "gather_",
        "reduce_scatter_",
        "_reduce_scatter_base_",
        "alltoall_",
        "alltoall_base_",
    }
)


@dataclass(slots=True)
class Reception:
    """A collective that the loop began, and what it left in this rank's tensors."""

    op: str  #: name of the ``c10d`` op
    group: str
    received: list[Tensor] = field(default_factory=list)  #: copies, or the loop's own tensors without their history
    extremes: list[Tensor] = field(default_factory=list)  #: of what this rank sent
    versions: list[int] = field(default_factory=list)  #: of the loop's tensors when they had arrived; none for copies
    copied: bool = False
    obstacle: str = NOT_WAITED  #: why it cannot be used, in words; empty where it can

    def arrived(self) -> None:
        """The loop has waited for it: the values are there."""
        if self.obstacle != NOT_WAITED:
            return
        self.copied = sum(tensor.nbytes for tensor in self.received) <= COPIED_BYTES
        if self.copied:
            self.received = [tensor.clone() for tensor in self.received]
        else:
            self.versions = [version_counter(tensor) for tensor in self.received]
        self.obstacle = ""

    def difference(self, op: str, group: str, args: tuple[Any, ...]) -> str:
        """Why it is not what a collective that is about to begin would bring, in words; empty where it is.

        Args:
            op: Name of the ``c10d`` op.
            group: Name of its process group.
            args: Its arguments.
        """
        if self.obstacle:
            return self.obstacle
        targets = list(tensors_in(args[0]))
        same = [(each.shape, each.dtype) for each in targets] == [(each.shape, each.dtype) for each in self.received]
        if (op, group) != (self.op, self.group) or not same:
            return "the real step did something else at this place"
        if not self.copied and self.versions != [version_counter(tensor) for tensor in self.received]:
            return "what it brought was changed in place since"
        if not alike(extremes_of(op, args), self.extremes):
            return "what this rank sends came out otherwise this time"
        return ""

    def hand_to(self, args: tuple[Any, ...]) -> None:
        """Writes what was received into the tensors of a collective that is run again; no counter of theirs moves."""
        for target, value in zip(tensors_in(args[0]), self.received, strict=True):
            target.data.copy_(value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of an argument of a collective, through nested lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def extremes_of(op: str, args: tuple[Any, ...]) -> list[Tensor]:
    """Least and greatest value (or NaN) of each tensor that this rank is about to send; no sync."""
    sent = args[0] if op in _SEND_FIRST else args[1] if op in _SEND_SECOND else ()
    return [end for tensor in tensors_in(sent) if measurable(tensor) for end in extremes(tensor)]


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
