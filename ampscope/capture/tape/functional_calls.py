"""The tape knows calls of a model through torch.func, weights by name, and gradients that no backward left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.events import Through
from ampscope.capture.tape.call_tape import Tape
from ampscope.capture.tape.tape_entry import (
    CalledThrough,
    EarlierResult,
    Entry,
    EntryKind,
    GradientOf,
    OutsideTensor,
    TensorReference,
)
from ampscope.capture.torch_support import tensor_tree, transforms
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.torch_private import storage_key
from ampscope.trace.schema import Node


def weights_by_name(value: Any, models: Models) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested tuples, lists and dictionaries that stand under the name of a parameter, with its shape.

    Those of several models, stacked, have one dimension more in front.
    """
    shapes = {name: parameter.shape for name, parameter in models.parameters.values()}
    for name, each in under_names(value, models):
        if isinstance(each, Tensor) and shapes[name] in (each.shape, each.shape[1:]):
            yield name, each


def under_names(value: Any, models: Models) -> Iterator[tuple[str, Any]]:
    """Yields what stands under the name of a parameter in nested tuples, lists and dictionaries."""
    names = {name for name, _ in models.parameters.values()}
    front = [value]
    while front:
        each = front.pop()
        if isinstance(each, (list, tuple)):
            front += each
        elif isinstance(each, Mapping):
            yield from ((name, inside) for name, inside in each.items() if name in names)


def were_updated(tape: Tape, asked: Sequence[int], weights: Iterator[tuple[str, Tensor]]) -> bool:
    """Whether a loop has made any of ``weights`` of the gradients that it has asked for, or written it with them.

    Not where autograd goes on through them: an inner step of meta-learning is a part of its step.

    Args:
        tape: The tape.
        asked: Numbers of the entries that gave gradients.
        weights: That the loop is about to use.
    """
    derived: set[int] | None = None
    for _, tensor in weights:
        known = tape.results.find(tensor)
        if known is not None and known.source.entry > asked[0] and tensor.grad_fn is None:
            derived = {number for number, _ in _derived(tape, asked)} if derived is None else derived
            if known.source.entry in derived:
                return True
    return False


def update_was_made(tape: Tape, asked: Sequence[int]) -> bool:
    """Whether a loop has put gradients together with what they were asked of: with its weights.

    Args:
        tape: The tape.
        asked: Numbers of the entries that gave gradients.
    """
    operands = {_key(each) for number in asked if number >= tape.start for each in tape[number].arguments.tensors}
    return any(_key(each) in operands for _, reads in _derived(tape, asked) for each in reads)


def come_of(tape: Tape, asked: Sequence[int], values: Iterable[Tensor]) -> bool:
    """Whether any of ``values`` was computed from what the entries ``asked`` gave, or is that itself."""
    derived = {*asked, *(number for number, _ in _derived(tape, asked))}
    return any((known := tape.results.find(each)) is not None and known.source.entry in derived for each in values)


def _derived(tape: Tape, asked: Sequence[int]) -> Iterator[tuple[int, list[TensorReference]]]:
    """The entries that compute with gradients, or with what came of them: their numbers, and what they read."""
    derived = set(asked)
    for number in range(max(min(asked, default=tape.end) + 1, tape.start), tape.end):
        reads = list(tape[number].arguments.tensors)
        if any(isinstance(each, EarlierResult) and each.entry in derived for each in reads):
            derived.add(number)
            yield number, reads


def _key(reference: TensorReference) -> object:
    if isinstance(reference, EarlierResult):
        return reference.entry, reference.leaf
    return reference.identity if isinstance(reference, OutsideTensor) else reference


class FunctionalStep(NamedTuple):
    """A step whose gradients no backward leaves, or whose weights the loop keeps by itself, as far as it is known."""

    tape: Tape
    since: int  #: where it begins on the tape
    has_backward: bool
    models: Models

    @property
    def asked(self) -> int | None:
        """Number of the first entry that gave gradients; None without any."""
        return next((number for number, _ in self._asking()), None)

    def given(self) -> dict[str, Tensor]:
        """The gradients, by parameter, as far as they are still there; see `sources`."""
        sources = self.sources()
        alive = {(at.entry, at.leaf): tensor for tensor, at in self.tape.results.alive()} if sources else {}
        found = ((name, alive.get((source.entry, source.leaf))) for name, source in sources.items())
        return {name: gradient for name, gradient in found if gradient is not None}

    def sources(self) -> dict[str, EarlierResult]:
        """Returns what gave each parameter's gradient: those assigned, else those asked for; none after a backward."""
        if self.has_backward:
            return {}
        found = self.tape.results.assigned(self.models, self.since)
        if not found:
            for number, entry in self._asking():
                found |= {name: EarlierResult(number, leaf) for name, leaf in self._named(entry).items()}
        return found

    def _named(self, entry: Entry) -> dict[str, int]:
        """Returns which result of an entry is a parameter's gradient, by the parameter's name."""
        if entry.through is not None:
            return entry.through.leaves
        _, inputs, *_ = (*entry.arguments.args, entry.arguments.kwargs.get("inputs"), None)
        references = inputs if isinstance(inputs, (list, tuple)) else [inputs]
        names = {key: name for key, (name, _) in self.models.parameters.items()} | self._brought()
        known = [names.get(each.identity) if isinstance(each, OutsideTensor) else None for each in references]
        return {name: leaf for leaf, name in enumerate(known) if name is not None}

    def _brought(self) -> dict[int, str]:
        """The names of the weights that the loop has brought along, by ``id``."""
        calls = (self.tape[number] for number in range(max(self.since, self.tape.start), self.tape.end))
        operands = (entry.arguments.args for entry in calls if entry.through is not None)
        known = (each for args in operands for each in under_names(args, self.models))
        return {each.identity: name for name, each in known if isinstance(each, OutsideTensor)}

    def losses(self) -> list[Tensor]:
        """Returns the values of which gradients were asked, as far as these were seen; none after a backward."""
        asking = [] if self.has_backward else [entry for _, entry in self._asking()]
        values = [entry.through.value for entry in asking if entry.through is not None]
        asked = [loss for entry in asking if entry.through is None for loss in entry.fingerprint]
        return [value for value in values if value is not None] + asked

    def was_updated(self, through: Through | None = None) -> bool:
        """Whether the loop has updated weights of its own with the gradients that it has asked for.

        Args:
            through: What is about to call a model with weights; None where nothing is.
        """
        asked = [number for number, _ in self._asking()]
        if not asked or through is None:
            return bool(asked) and update_was_made(self.tape, asked)
        return were_updated(self.tape, asked, weights_by_name(through.operands, self.models))

    @property
    def latest(self) -> int:
        """Number of the last entry that gave gradients."""
        return max(number for number, _ in self._asking())

    def takes_up(self, asked: list[int], operands: Iterable[Tensor] | None) -> bool:
        """Whether what the entries ``asked`` gave is in ``operands``, or, with None, in weights of the loop's own."""
        if operands is None:
            return update_was_made(self.tape, asked)
        return come_of(self.tape, asked, operands)

    def weights_given(self, through: Through) -> list[Tensor]:
        """The weights that the loop gives to whatever is about to call a model."""
        return [weight for _, weight in weights_by_name(through.operands, self.models)]

    def is_over(self) -> None:
        """Ends the step: what the loop has made in it is where the next one begins, as weights or a batch."""
        self.tape.results.let_go_of_values()

    def _asking(self) -> Iterator[tuple[int, Entry]]:
        for number in range(max(self.since, self.tape.start), self.tape.end):
            entry = self.tape[number]
            if entry.call is torch.autograd.grad or (entry.through is not None and entry.through.leaves):
                yield number, entry


def gradient_leaves(result: Any, models: Models) -> dict[str, int]:
    """Finds which tensors in a transform's result are gradients of parameters: those under a parameter's name."""
    order = {id(tensor): leaf for leaf, tensor in enumerate(tensor_tree.tensors(result))}
    return {name: order[id(tensor)] for name, tensor in weights_by_name(result, models)}


def called_through(through: Through, tape: Tape, models: Models) -> CalledThrough:
    """Describes for the tape what calls a model in the loop's place; its reads from outside are noted as it runs."""
    models.stand_ins.lend(weights_by_name(through.operands, models))
    found = CalledThrough(through.call, through.inputs, lends=not through.is_transform)
    through.reads = outside_reader(tape, found.reads) if through.is_transform else None
    return found


def outside_reader(tape: Tape, reads: dict[int, EarlierResult]) -> Callable[[Tensor], Tensor]:
    """Makes a function that is shown each tensor that a call reads, notes it in ``reads`` by ``id``, and returns it."""

    def read(tensor: Tensor) -> Tensor:
        if id(tensor) not in reads:
            source = tape.earlier_result(tensor, overwrites=False)
            if source is not None:
                reads[id(tensor)] = source
        return tensor

    return read


Named = tuple[Tensor, Node, str]


def named_tensors(entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], models: Models) -> Iterator[Named]:
    """The tensors that a call of the tape is given, each with what it is and its name.

    Args:
        entry: The call.
        args: Its arguments in the replay.
        kwargs: Its keyword arguments in the replay.
        models: The watched models.
    """
    weights: dict[int, Tensor] = {}
    if entry.through is not None:
        for tensor, name in _weights(entry, args, kwargs, models):
            weights[id(tensor)] = tensor
            yield tensor, Node.PARAMETER, name
        args, kwargs = transforms.given(args, entry.through.inputs), {}
    what = "" if entry.kind is EntryKind.MODULE else f"{getattr(entry.call, '__name__', 'a function')} "
    pairs = zip(tensor_tree.tensors((args, kwargs)), entry.arguments.tensors, strict=False)
    gradients = {id(tensor) for tensor, reference in pairs if isinstance(reference, GradientOf)}
    for name, tensor in named_inputs(args, kwargs):
        if id(tensor) not in weights and id(tensor) not in gradients:
            yield tensor, Node.INPUT, what + name


def _weights(
    entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], models: Models
) -> Iterator[tuple[Tensor, str]]:
    """Yields what takes the place of the model's weights, by their names; also what only lives in their memory."""
    known = {storage_key(p): name for name, p in models.parameters.values() if _has_memory(p)}
    for tensor, reference in zip(tensor_tree.tensors((args, kwargs)), entry.arguments.tensors, strict=True):
        if isinstance(reference, OutsideTensor) and _has_memory(reference.tensor):
            name = known.get(storage_key(reference.tensor))
            if name is not None:
                yield tensor, name
    if entry.through is not None:
        given = args[1] if entry.through.lends else transforms.given(args, entry.through.inputs)
        yield from ((tensor, name) for name, tensor in weights_by_name(given, models))


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0


def named_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors a module was called with, named as the user would: ``args[0]``, ``input_ids``."""
    for index, value in enumerate(args):
        found = list(tensor_tree.tensors(value))
        for part, tensor in enumerate(found):
            yield f"args[{index}]" if len(found) == 1 else f"args[{index}][{part}]", tensor
    for name, value in kwargs.items():
        found = list(tensor_tree.tensors(value))
        for part, tensor in enumerate(found):
            yield name if len(found) == 1 else f"{name}[{part}]", tensor
