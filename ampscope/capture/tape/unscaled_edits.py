"""The loop's edits of its gradients between ``scaler.unscale_`` and the step are noted, and taped if need be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim.optimizer import Optimizer

from ampscope.capture.tape.call_tape import Tape
from ampscope.capture.tape.tape_entry import (
    Arguments,
    EarlierResult,
    Entry,
    OutsideTensor,
    TensorReference,
    UnscaledGradients,
)
from ampscope.capture.torch_support import call_state, tensor_tree, torch_private
from ampscope.capture.torch_support.call_state import RandomState
from ampscope.capture.torch_support.function_names import draws_random_numbers, gives_to_python, is_in_place
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.torch_private import version_counter
from ampscope.capture.torch_support.user_line import NOWHERE, Place, place_of
from ampscope.capture.tracing.light_statistics import stored

_ASSIGNED: Any = Tensor.grad  # a descriptor, typed as its value
#: torch's own clipping makes finite gradients of finite ones.
_CLIPS = clip_grad.__file__
#: Where torch's operators on tensors are written in Python.
_OPERATORS = frozenset({torch.overrides.__file__, torch._tensor.__file__})
#: Bytes that are kept alive until the step of what the loop reads and makes there, beside weights and their gradients,
#: and calls that are kept.
MOST_KEPT, MOST_CALLS = 1 << 26, 5_000
TOO_MUCH = (
    "what the loop did to its gradients after unscale_ was too much to keep "
    f"(more than {MOST_KEPT >> 20} MiB, or than {MOST_CALLS} calls)"
)


class _Edit(NamedTuple):
    """A call of the loop's."""

    func: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    result: Any
    place: Place
    random: RandomState | None  #: before the first call that draws
    originals: dict[int, Tensor]  #: what it overwrote of the loop's own, as it was, by ``id``


class EditLog:
    """The calls of one step since its gradients were unscaled.

    Args:
        tape: Where they go if need be.
        models: The watched models.
        edited: The loop is taken to change gradients, though nobody hears it.
    """

    def __init__(self, tape: Tape, models: Models, *, edited: bool = False) -> None:
        self._tape = tape
        self._models = models
        self._ambient = call_state.ambient_with(call_state.device_types(), grad=False)  # gradients are numbers here
        self._calls: list[_Edit | tuple[UnscaledGradients, Place]] = []
        self._unjudged: set[int] = set()  # optimizers whose gradients were unscaled, by ``id``
        self._kept: set[int] = set()  # what the calls keep alive, by ``id``
        self._bytes = 0
        self._too_much = False
        self._drew = False
        self._was_read = False
        self.follows_read = False  #: the loop went on after Python had read numbers of what it did: it may have decided
        self.edited = edited  #: the loop has done something that may make gradients other than finite
        self.is_open = False  #: calls are the loop's, not the scaler's

    def unscaled(self, optimizer: Optimizer, scale: Tensor, place: Place | None) -> None:
        """A scaler has divided the gradients of an optimizer by the scale."""
        gradients = UnscaledGradients((), {}, [], optimizer, scale, self._models.parameters)
        self._calls.append((gradients, place or NOWHERE))
        self._unjudged.add(id(optimizer))
        self.is_open = True

    def before(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[int, Tensor]]:
        """Takes what must be known before a function runs: generators, and what it overwrites of the loop's own."""
        random, originals = None, dict[int, Tensor]()
        if self._too_much:
            return random, originals
        if getattr(func, "__self__", None) is _ASSIGNED:
            self._replaced(args[0].grad)
        if not self._drew and draws_random_numbers(getattr(func, "__name__", "")):
            self._drew = True
            random = RandomState.take({each.device for each in tensor_tree.tensors((args, kwargs))})
        if args and not self._tape.gradients.holds(args[0]) and is_in_place(func, kwargs):
            originals = self._tape.overwritten_unknown(args, kwargs, is_repeated=False)
        return random, originals

    def note(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        result: Any,
        *,
        before: tuple[RandomState | None, dict[int, Tensor]],
        frame: FrameType | None,
    ) -> None:
        """A function has run that was called in ``frame``."""
        while frame is not None and frame.f_code.co_filename in _OPERATORS:
            frame = frame.f_back
        self.follows_read = self.follows_read or self._was_read
        reads = gives_to_python(func)
        self._was_read = self._was_read or (reads and bool(args) and self._is_of_gradients(args[0]))
        self.edited = self.edited or not (reads or (frame is not None and frame.f_code.co_filename == _CLIPS))
        if self._too_much or getattr(func, "__self__", None) is _ASSIGNED:
            return
        self._calls.append(_Edit(func, args, kwargs, result, place_of(frame) or NOWHERE, *before))
        self._keep(args, kwargs, result)
        if self._bytes > MOST_KEPT or len(self._calls) > MOST_CALLS:
            self._let_go()
            self._too_much = True

    def _keep(self, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Counts what a call keeps alive, each tensor once; weights and their gradients are there anyway."""
        if isinstance(result, Tensor) and args and _is_alias(result, args[0]):
            self._kept.add(id(result))
        for tensor in tensor_tree.tensors((args, kwargs, result)):
            if id(tensor) in self._kept:
                continue
            self._kept.add(id(tensor))
            if id(tensor) not in self._models.parameters and not self._tape.gradients.holds(tensor):
                self._bytes += stored(tensor).nbytes

    def _is_of_gradients(self, value: Any) -> bool:
        return id(value) in self._kept or self._tape.gradients.holds(value)

    def _replaced(self, gradient: Tensor | None) -> None:
        """Counts a gradient that is there for the calls alone from now on."""
        if gradient is not None and id(gradient) in self._kept and self._tape.gradients.holds(gradient):
            self._bytes += stored(gradient).nbytes

    def judged(self, optimizer: Optimizer) -> None:
        """Lets go of what the loop called, before an optimizer steps, unless another of them is still to be judged."""
        self._unjudged.discard(id(optimizer))
        if not self._unjudged:
            self._let_go()
            self._too_much = False

    def _let_go(self) -> None:
        self._calls = [each for each in self._calls if not isinstance(each, _Edit)]
        self._kept.clear()
        self._bytes, self._drew = 0, False

    @property
    def may_be_learned(self) -> bool:
        """Whether a later step can be expected to make the same calls: none follows a number that Python has read."""
        return not (self._too_much or self.follows_read)

    def forget(self) -> None:
        """Lets go of all: nothing of it will be run again."""
        self._let_go()
        self._calls.clear()
        self.is_open = self.edited = self._was_read = self.follows_read = False

    def write(self) -> None:
        """Puts the calls onto the tape; where they were too much to keep, that is why the step cannot be replayed."""
        if self._too_much:
            self._tape.obstacle = self._tape.obstacle or TOO_MUCH
        for each in self._calls:
            if not isinstance(each, _Edit):
                self._tape.unscaled(each[0], ambient=self._ambient, place=each[1])
                continue
            self._tape.function_call(
                each.func,
                each.args,
                each.kwargs,
                each.result,
                ambient=self._ambient,
                place=each.place,
                random=each.random,
                originals=each.originals,
            )
        self.forget()


def _is_alias(result: Tensor, source: Any) -> bool:
    """Whether a tensor lives in the memory of another, as ``x.data`` does."""
    if not isinstance(source, Tensor) or result is source:
        return result is source
    strided = result.layout is torch.strided and source.layout is torch.strided
    return strided and torch_private.storage_key(result) == torch_private.storage_key(source)


#: Bytes that the calls may keep alive, of what they read beside weights and gradients.
MOST_LEARNED = 1 << 20


class LearnedEdits(NamedTuple):
    """The calls after the last backward of a step, numbered from the step's first entry."""

    after: int  #: entries that come before them
    entries: list[Entry]
    assigned: dict[str, EarlierResult]  #: gradients that they made, by name of the parameter

    @staticmethod
    def of(tape: Tape, models: Models, since: int, after: int) -> LearnedEdits | None:
        """Takes the edits of the step on a tape, as far as another step can be expected to make the same.

        Args:
            tape: The tape.
            models: The watched models.
            since: Number of the step's first entry.
            after: Number of the first after the last backward.

        Returns:
            None where they draw random numbers, write what only this step had, or follow a number that Python read.
        """
        found = tape.entries[after - tape.start :]
        reads = any(after <= at < tape.end for at, _ in tape.results.given_to_python)
        if not found or reads or any(entry.state.random is not None for entry in found):
            return None
        kept = {id(each.tensor): each for entry in found for each in entry.arguments.outside}
        if any(each.identity != id(each.tensor) for each in kept.values()) or _bytes_of(kept, models) > MOST_LEARNED:
            return None
        writes = [entry.arguments.tensors[0] for entry in found if entry.in_place and entry.arguments.tensors]
        refers = [result.entry for entry in found for result in (*entry.arguments.earlier, *entry.also_writes)]
        if any(isinstance(target, OutsideTensor) for target in writes) or min(refers, default=since) < since:
            return None
        moved = [_moved(entry, lambda number: number - since) for entry in found]
        made = tape.results.assigned(models, after).items()
        return LearnedEdits(after - since, moved, {name: EarlierResult(at.entry - since, at.leaf) for name, at in made})

    def put(self, tape: Tape, models: Models, since: int, *, unscaled: bool) -> None:
        """Puts them onto the tape of the present step.

        Args:
            tape: The tape.
            models: The watched models.
            since: Number of the step's first entry.
            unscaled: Those too that come once its gradients were unscaled; else those alone that come before.
        """
        for number, entry in enumerate(self.entries, self.after):
            if isinstance(entry.arguments, UnscaledGradients) and not unscaled:
                break
            if number + since == tape.end:
                tape.entries.append(_moved(entry, lambda known: known + since))
        for name, parameter in models.parameters.values():
            made = self.assigned.get(name)
            if made is not None and parameter.grad is not None and made.entry + since < tape.end:
                tape.results.add(parameter.grad, EarlierResult(made.entry + since, made.leaf))


def _moved(entry: Entry, number: Callable[[int], int]) -> Entry:
    """An entry that stands elsewhere, and reads what is outside as it is now."""
    references: list[TensorReference] = []

    def moved(reference: TensorReference) -> TensorReference:
        if isinstance(reference, EarlierResult):
            references.append(EarlierResult(number(reference.entry), reference.leaf))
        elif isinstance(reference, OutsideTensor):
            tensor = reference.tensor
            references.append(OutsideTensor(tensor, version_counter(tensor), id(tensor)))
        else:
            references.append(reference)
        return references[-1]

    if isinstance(entry.arguments, UnscaledGradients):
        return entry
    args, kwargs = tensor_tree.rebuild((entry.arguments.args, entry.arguments.kwargs), moved, TensorReference)
    also = [EarlierResult(number(each.entry), each.leaf) for each in entry.also_writes]
    return replace(entry, arguments=Arguments(args, kwargs, references), also_writes=also)


def _bytes_of(kept: dict[int, OutsideTensor], models: Models) -> int:
    return sum(each.tensor.nbytes for key, each in kept.items() if key not in models.parameters)
