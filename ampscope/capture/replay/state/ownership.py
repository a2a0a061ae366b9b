"""The rule by which a replay treats the objects that it meets in a model's attributes.

1. What forward computes with is copied: containers, generators, and objects that hold tensors or generators. No code of
   theirs runs (`tensor_tree.plain_copy`), and in the place of tensors the copies hold substitutes.
2. What drives the training is left alone: an object of a kind of torch's (an optimizer, a scheduler, a data loader, a
   scaler, a process group), and an object that reaches one, as trainers, strategies and loops do.
3. Every other object (a configuration, a counter) is used as it is, and its attributes are put back.

An object that is too large to be looked through is used as it is, too: what was seen of it is put back.
"""

from __future__ import annotations

import collections
import random
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.torch_support.tensor_tree import is_plain_object

#: Objects looked at to find out what one of them is.
_MOST = 4000
_ATOMS = (bool, int, float, complex, str, bytes, type(None), Tensor)
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)


class Treatment(Enum):
    """The ways in which a replay treats an object."""

    COPIED = auto()
    LEFT_ALONE = auto()
    PUT_BACK = auto()


class Judged(NamedTuple):
    """An object, looked through."""

    treatment: Treatment
    seen: list[Any]  #: the plain objects and containers that it consists of, itself included


def is_generator(value: Any) -> bool:
    """Whether ``value`` draws random numbers: torch's, Python's or NumPy's kind."""
    kind = type(value)
    return issubclass(kind, (torch.Generator, random.Random)) or kind.__module__.startswith("numpy.random")


def judged(value: Any) -> Judged:
    """Looks through a plain object, in breadth, and says what becomes of it."""
    driving, seen, holds_state = _driving_kinds(), {id(value): value}, False
    front = collections.deque([value])
    while front:
        for item in _held(front.popleft()):
            if issubclass(type(item), driving):
                return Judged(Treatment.LEFT_ALONE, [])
            holds_state = holds_state or issubclass(type(item), Tensor) or is_generator(item)
            if id(item) not in seen and _can_be_entered(item):
                if len(seen) == _MOST:
                    return Judged(Treatment.PUT_BACK, list(seen.values()))
                seen[id(item)] = item
                front.append(item)
    return Judged(Treatment.COPIED if holds_state else Treatment.PUT_BACK, list(seen.values()))


def _driving_kinds() -> tuple[type, ...]:
    kinds: list[type] = [torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler]
    kinds.append(torch.utils.data.DataLoader)
    if torch.distributed.is_available():
        kinds.append(torch.distributed.ProcessGroup)
    return tuple(kinds)


def _can_be_entered(item: Any) -> bool:
    return not issubclass(type(item), _ATOMS) and (issubclass(type(item), _CONTAINERS) or is_plain_object(item))


def _held(value: Any) -> list[Any]:
    """Lists what a container or a plain object holds, read at once, for other threads may change it."""
    kind = next((kind for kind in _CONTAINERS if issubclass(type(value), kind)), None)
    if kind is None:
        return list(vars(value).values())
    return list(dict.values(value) if kind is dict else kind.__iter__(value))
