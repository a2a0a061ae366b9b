"""A run holds state from step to step; its values are looked at without waiting for the device."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.events import StepAttempt, StepObserver, StepStart
from ampscope.capture.isolation.state_snapshot import AttributeTensor
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.torch_support.readback import Parcel
from ampscope.capture.torch_support.sharding import local
from ampscope.capture.torch_support.tensor_tree import inner_tensors
from ampscope.capture.torch_support.torch_private import version_counter
from ampscope.capture.torch_support.user_line import Place
from ampscope.capture.tracing import light_statistics
from ampscope.capture.tracing.light_statistics import numbers
from ampscope.trace.schema import Looked, StateKind

#: Elements from which a look by extremes is several times faster than by a norm, on a CPU.
_MANY = 1 << 10
#: Elements of a loop's own tensors that are looked at in one step, in all.
MOST_LOOKED_AT = 1 << 22
#: Dtypes that are measured as they are.
_ORDINARY = frozenset({torch.float32, torch.float16, torch.bfloat16})
_PLAIN = (Tensor, nn.Parameter)


class HeldTensor(NamedTuple):
    """A tensor that a run holds from step to step."""

    kind: StateKind
    name: str  #: of a parameter or buffer its qualified name; of optimizer state its key; else what it was called
    owner: str  #: the parameter whose state it is; empty for other kinds
    tensor: Tensor
    place: Place | None = None  #: the line that read it, where that is known

    @property
    def key(self) -> str:
        """The name by which the tensor is known, with that of its owner."""
        return f"{self.name} of {self.owner}" if self.owner else self.name

    @property
    def module(self) -> str:
        """Qualified name of the module that it, or its parameter, belongs to; empty for the loop's own."""
        if self.kind is StateKind.CARRIED:
            return ""
        return (self.owner or self.name).rpartition(".")[0]


class StateLooks(NamedTuple):
    """The outcome of looks at a tensor that was found not to be finite."""

    finite_at: int | None  #: the last step after which it was seen finite; None where it never was
    bad_at: int  #: the first step after which it was seen not to be
    when: Looked = Looked.AFTER


class StateHistory:
    """Remembers, of every tensor that was found not to be finite, since when it is so."""

    def __init__(self) -> None:
        self._seen: dict[tuple[StateKind, str], StateLooks] = {}

    def of(self, held: HeldTensor) -> StateLooks | None:
        """Returns since when a tensor is not finite; None for one that was never seen so."""
        return self._seen.get((held.kind, held.key))

    def note_bad(self, held: HeldTensor, *, step: int, finite_at: int | None, when: Looked = Looked.AFTER) -> bool:
        """Takes down that a tensor was not finite after a step; returns whether that is new.

        Args:
            held: The tensor.
            step: The step after which it was looked at.
            finite_at: The step after the last look before; it counts where the tensor is seen bad for the first time.
            when: When in that step it was seen.
        """
        if (held.kind, held.key) in self._seen:
            return False
        self._seen[held.kind, held.key] = StateLooks(finite_at if finite_at != -1 else None, step, when)
        return True


def weights(models: Models) -> Iterator[HeldTensor]:
    """The watched parameters with values that can be looked at; frozen ones are as whoever froze them wants them."""
    for name, parameter in models.parameters.values():
        for tensor in inner_tensors(parameter) or [parameter]:
            if parameter.requires_grad and light_statistics.may_turn_bad(local(tensor)):
                yield HeldTensor(StateKind.WEIGHT, name, "", tensor)


def optimizer_state(optimizer: Optimizer, models: Models) -> Iterator[HeldTensor]:
    """Yields the state that ``optimizer`` keeps of each watched parameter, as far as it can be looked at.

    Single numbers of larger parameters are left out: best losses and distances begin at infinity.
    """
    view = OptimizerView(optimizer)
    for parameter in view.parameters:
        known, state = models.parameters.get(id(parameter)), view.state.get(parameter)
        if known is None or not isinstance(state, dict):
            continue
        for key, value in state.items():
            if (
                isinstance(value, Tensor)
                and (value.dim() or not parameter.dim())
                and light_statistics.may_turn_bad(local(value))
            ):
                yield HeldTensor(StateKind.OPTIMIZER, str(key), known[0], value)


def largest(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The largest magnitude of each tensor as a device scalar; not finite where any of its elements is not."""
    with torch.no_grad():
        here = [each if each.dtype in _ORDINARY and type(each) is Tensor else _plain(each) for each in tensors]
        many = {index for index, each in enumerate(here) if each.is_cpu and each.numel() >= _MANY}
        if not many:
            return list(torch._foreach_norm(here, math.inf)) if here else []
        rest = [each for index, each in enumerate(here) if index not in many]
        norms = iter(torch._foreach_norm(rest, math.inf) if rest else ())
        return [_extreme(each) if index in many else next(norms) for index, each in enumerate(here)]


def largest_within(tensors: Sequence[Tensor], most: int = MOST_LOOKED_AT) -> list[Tensor | None]:
    """Measures tensors that may be anything by `largest`; None for those that cannot be looked at.

    Args:
        tensors: Of the loop's own; memory that was given back is not read.
        most: Elements that are looked at, in all.
    """
    chosen: dict[int, Tensor] = {}
    for place, tensor in enumerate(tensors):
        can = type(tensor) in _PLAIN and light_statistics.may_turn_bad(tensor) and tensor.numel() <= most
        if can and tensor.untyped_storage().nbytes():
            most -= tensor.numel()
            chosen[place] = tensor.detach()
    found: list[Tensor | None] = [None] * len(tensors)
    for place, norm in zip(chosen, largest([*chosen.values()]), strict=True):
        found[place] = norm
    return found


def _plain(tensor: Tensor) -> Tensor:
    return numbers(local(tensor).detach())


def _extreme(tensor: Tensor) -> Tensor:
    low, high = torch.aminmax(tensor)
    return torch.maximum(high, -low)


class AttributeLooks:
    """Looks at the tensors in plain attributes of the modules once a step; keeps none of them alive."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[weakref.ref[Tensor], int]] = {}  # and its change counter then

    def changed(self, held: list[AttributeTensor]) -> list[AttributeTensor]:
        """Returns those of ``held`` that were not there at the look before, or were written since."""
        before = self._seen
        self._seen = {each.name: (weakref.ref(each.tensor), version_counter(each.tensor)) for each in held}
        return [each for each in held if not _is_same(before.get(each.name), each.tensor)]

    def left_there(self, held: list[AttributeTensor]) -> dict[int, str]:
        """Names of those of ``held`` that were there at the latest look, by ``id``: no loop has brought them since."""
        seen = {id(tensor) for reference, _ in self._seen.values() if (tensor := reference()) is not None}
        return {id(each.tensor): each.name for each in held if id(each.tensor) in seen}


def _is_same(known: tuple[weakref.ref[Tensor], int] | None, tensor: Tensor) -> bool:
    return known is not None and known[0]() is tensor and known[1] == version_counter(tensor)


#: Steps after which the list of buffers is drawn up anew.
REVIEW_EVERY = 50
#: Elements up to which a buffer is measured at every step, for batch normalisation writes without counting; what else
#: there is, only where its change counter moved.
ALWAYS_MEASURED = 1 << 16


class WrittenState(StepObserver):
    """Buffers and carried tensors that a step wrote to, and whether they are still finite.

    Running statistics and moving averages are poisoned silently: loss and gradients of that step may be fine, and the
    symptom shows when the buffer is read, perhaps much later. What is not finite from the start (a mask of -inf, a
    best score so far) is left alone.

    Args:
        models: The watched models.
        history: Takes down what is seen.
        guard: Catches faults in looking.
    """

    def __init__(self, models: Models, history: StateHistory, guard: Guard) -> None:
        self.guard = guard
        self._models = models
        self._history = history
        self._written: dict[str, tuple[int, int]] = {}  #: identity and change counter at the last look
        self._buffers: list[tuple[str, dict[str, Tensor | None], str]] = []
        self._carried: dict[str, weakref.ref[Tensor]] = {}
        self._looks = 0
        self._revision = -1  # of the models when the list was drawn up
        self._look = _Look(-1, -1, [], Parcel({}), judged=True)
        self._first: _Look | None = None  # the look before the first step
        self._not_finite_then: set[str] = set()
        self._told: set[str] = set()

    def step_began(self, start: StepStart) -> None:
        """Takes down what is not finite from the start, before the first step of all."""
        if start.number == 0:
            self.start()

    def attempt_began(self, attempt: StepAttempt) -> None:
        """Measures what the step has written, before each optimizer."""
        self.send(attempt.step)

    def start(self) -> None:
        """Measures all before the first step: what is not finite then is so on purpose."""
        self._from_start()
        self.send(-1)
        self._first, self._look.judged = self._look, True  # or will be, when it is asked for

    def _from_start(self) -> set[str]:
        """Returns the names of what was not finite before the first step; known wherever something later is."""
        first, self._first = self._first, None
        if first is not None:
            self._not_finite_then.update(self._bad(first))
        return self._not_finite_then

    def carry(self, name: str, tensor: Tensor) -> None:
        """Looks at a tensor of the loop's own from now on, as long as it lives; kept weakly.

        Args:
            name: What to call it; another tensor of this name takes its place.
            tensor: With floating values.
        """
        self._carried[name] = weakref.ref(tensor)

    def send(self, step: int) -> None:
        """Measures what was written to since the last look, without waiting for the device.

        Args:
            step: Whose writes they are.
        """
        if self._looks % REVIEW_EVERY == 0 or self._revision != self._models.revision:
            self._buffers, self._revision = list(self._floating()), self._models.revision
        self._looks += 1
        if not self._look.judged:  # nobody knows what came out: it is measured once more
            for name in self._look.names:
                self._written.pop(name, None)
        changed: dict[str, Tensor] = {}
        for name, table, key in self._buffers:
            buffer = table.get(key)
            if buffer is None or type(buffer) is not Tensor or not light_statistics.may_turn_bad(buffer):
                continue
            if buffer.numel() <= ALWAYS_MEASURED or self._is_changed(name, buffer):
                changed[name] = buffer
        for name, reference in self._carried.items():
            tensor = reference()
            if tensor is not None and light_statistics.may_turn_bad(tensor) and self._is_changed(name, tensor):
                changed[name] = tensor
        sizes = largest(list(changed.values())) if changed else ()
        self._look = _Look(step, self._look.step, list(changed), Parcel(dict(zip(changed, sizes, strict=True))))

    def _is_changed(self, name: str, tensor: Tensor) -> bool:
        before, mark = self._written.get(name), (id(tensor), version_counter(tensor))
        self._written[name] = mark
        return before != mark

    def _floating(self) -> list[tuple[str, dict[str, Tensor | None], str]]:
        found = []
        for module in self._models.modules:
            for key, buffer in module._buffers.items():
                if buffer is not None and light_statistics.can_be_bad(buffer):
                    name = ".".join(filter(None, (self._models.names[id(module)], key)))
                    found.append((name, module._buffers, key))
        return found

    @property
    def finite_at(self) -> int:
        """The step after whose forward what has turned bad now was finite; -1 before the first."""
        return self._look.step_before

    def turned_bad(self) -> list[HeldTensor]:
        """Returns the tensors that were finite until this step and are no more, if known by now; told once."""
        look = self._look
        return self._turned_bad(look) if look.names and (look.parcel.is_here or look.parcel.arrived) else []

    def to_be_told(self) -> Callable[[], list[HeldTensor]]:
        """Gives what `turned_bad` would, of this step, when it is asked; waits then for what has not arrived."""
        look = self._look
        look.judged = True  # or will be
        return partial(self._turned_bad, look)

    def _turned_bad(self, look: _Look) -> list[HeldTensor]:
        bad = self._bad(look)
        if not bad:
            return []
        new = [name for name in bad if name not in self._from_start() and name not in self._told]
        self._told.update(new)
        for held in self._held(new):
            self._history.note_bad(held, step=look.step, finite_at=look.step_before)
        return self._held(new)

    def now_bad(self) -> list[HeldTensor]:
        """Returns the tensors that are not finite now, and were when the run began; waits for the device."""
        self._written.clear()
        self.send(self._look.step)
        return self._held([name for name in self._bad(self._look) if name not in self._from_start()])

    def _bad(self, look: _Look) -> list[str]:
        """Returns the names of the tensors that a look shows not to be finite."""
        look.judged = True
        values = look.parcel.values().items()
        return [name for name, value in values if value is not None and not math.isfinite(value)]

    def _held(self, names: list[str]) -> list[HeldTensor]:
        """The tensors of these names, as far as they still exist."""
        buffers = ((StateKind.BUFFER, name, table.get(key)) for name, table, key in self._buffers if name in names)
        carried = ((StateKind.CARRIED, name, self._carried[name]()) for name in names if name in self._carried)
        found = [*buffers, *carried] if names else []
        return [HeldTensor(kind, name, "", tensor) for kind, name, tensor in found if tensor is not None]


@dataclass(slots=True)
class _Look:
    """Holds the measures of one look, on their way to the host."""

    step: int  #: whose writes they are
    step_before: int  #: of the look before
    names: list[str]
    parcel: Parcel
    judged: bool = False  #: somebody has asked what came out
