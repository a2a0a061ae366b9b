"""Notes what a loop does to its gradients between ``scaler.unscale_`` and the step; it goes onto the tape if need be.

Many loops do something there in every step, and hardly ever does it go wrong. So a call is noted as it was made, which
takes next to nothing, and goes onto the tape when what has come of it is not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim.optimizer import Optimizer

from ampscope.capture.replay.tape.call_tape import Tape
from ampscope.capture.replay.tape.entry import UnscaledGradients
from ampscope.capture.torch_support import tensor_tree, torch_private
from ampscope.capture.torch_support.calls import call_state
from ampscope.capture.torch_support.calls.function_names import draws_random_numbers, gives_to_python, is_in_place
from ampscope.capture.torch_support.calls.random_state import RandomState
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.user_line import NOWHERE, Place, place_of
from ampscope.capture.tracing.statistics.tensor_values import stored

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
        self._ambient = call_state.around(call_state.device_types(), grad=False)  # gradients are numbers here
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
