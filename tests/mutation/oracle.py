"""An oracle, slow and without AMPscope, finds what is wrong with a mutant, since when, and which line began it.

It runs a mutant and its host unwatched, in their own precision, in float32 and with a quarter of the loss scale, and
believes what two seeds agree on.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.mutation.operators import Mutant
from tests.mutation.running import SCALE, Lane, Notes, run

#: How far apart, as a share of how far weights move, two trainings are that compute other things.
APART = 0.3
#: Times the distance that rounding alone brings about in the host.
NOISE = 5.0
#: Iterations in which nothing moves any more.
STILL = 8
SEEDS = (0, 1)
_FILE = Path("oracle_loop.py")
#: Ops that write what they are told to: an infinity in their result is no failure of theirs.
_TOLD = ("masked_fill", "index_fill", "full", "scalar_tensor", "fill_", "empty", "where", "new_")


class Kind(StrEnum):
    """The truth about a mutant."""

    SAME = "same"  #: it trains as its host does, up to rounding
    ERROR = "error"  #: the loop raises
    WEIGHTS = "weights"  #: weights are not finite any more
    STEPS = "steps"  #: losses or gradients are not finite, steps are lost
    STANDS = "stands"  #: nothing trains
    WRONG = "wrong"  #: the weights are not those of a calculation without the fault
    UNCLEAR = "unclear"  #: another training, about which nobody can say whether it was meant


@dataclass(frozen=True, slots=True)
class Truth:
    kind: Kind
    step: int | None = None  #: the first bad iteration
    lines: frozenset[int] = frozenset()  #: of the first op that made a value that is not finite

    @property
    def broken(self) -> bool:
        return self.kind not in {Kind.SAME, Kind.UNCLEAR}


@cache
def _host(source: str, lane: Lane) -> Notes:
    return run(source, lane)


def truth(mutant: Mutant, host: str, half: torch.dtype) -> Truth:
    """What two seeds agree on; unclear where they do not."""
    first, second = (_judged(mutant, host, half, seed) for seed in SEEDS)
    return first if first.kind is second.kind else Truth(Kind.UNCLEAR)


def _judged(mutant: Mutant, host: str, half: torch.dtype, seed: int) -> Truth:
    lane = Lane(half, seed=seed)
    own, right = run(mutant.source, lane), _host(host, lane)
    assert right.error is None
    assert all(right.finite)
    step = _first_bad(own, right)
    if step is None:
        return Truth(_silent(mutant, host, own, right, lane))
    kind = Kind.STEPS
    if not own.weights[-1].isfinite().all():
        kind = Kind.WEIGHTS
    elif own.error is not None:
        kind = Kind.ERROR
    elif _first_bad(run(mutant.source, Lane(half, scale=SCALE / 4, seed=seed)), right) is None:
        return Truth(Kind.UNCLEAR)  # a scale that has not been found yet
    return Truth(kind, step, frozenset(_born(mutant.source, lane, step)))


def _first_bad(own: Notes, right: Notes) -> int | None:
    """The first iteration that was not finite, or that an error ended."""
    for number, finite in enumerate(own.finite):
        if not finite or not own.weights[number + 1].isfinite().all():
            return number
    return len(own.finite) if own.error is not None else None


def _silent(mutant: Mutant, host: str, own: Notes, right: Notes, lane: Lane) -> Kind:
    """Of a mutant whose numbers are all finite."""
    if len(own.weights) < len(right.weights):
        return Kind.UNCLEAR  # it has left its loop
    if torch.equal(own.weights[-1], own.weights[-1 - STILL]):
        return Kind.STANDS
    if torch.equal(own.weights[-1], right.weights[-1]):
        return Kind.SAME
    plain = Lane(None, seed=lane.seed)
    noise = _apart(right, _host(host, plain))
    alone = run(mutant.source, plain)
    if alone.error is None and all(alone.finite) and _apart(own, alone) > max(APART, NOISE * noise):
        return Kind.WRONG
    if _apart(own, right) <= max(APART / NOISE, NOISE * noise / 2):
        return Kind.SAME
    return Kind.WRONG if mutant.fault else Kind.UNCLEAR


def _apart(one: Notes, other: Notes) -> float:
    size = min(len(one.weights), len(other.weights)) - 1
    moved = (other.weights[size] - other.weights[0]).norm()
    return float((one.weights[size] - other.weights[size]).norm() / moved.clamp(min=1e-12))


class _Births(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Finds the first op that makes a value that is not finite of finite ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [not _finite(each) for each in tree_leaves((args, kwargs))]
        out = func(*args, **(kwargs or {}))
        told = any(word in str(func) for word in _TOLD)
        if not self.lines and not told and not any(read) and not all(map(_finite, tree_leaves(out))):
            self.lines = list(_lines_now())
        return out


def _finite(value: object) -> bool:
    if isinstance(value, Tensor) and value.is_floating_point():
        return bool(value.isfinite().all())
    return not isinstance(value, float) or abs(value) < float("inf")


def _lines_now() -> Iterator[int]:
    """The loop's lines that the running op belongs to: of its forward call, where it is one of backward."""
    node: Any = torch._C._current_autograd_node()
    if node is not None:
        for each in reversed(node.metadata.get("traceback_", [])):
            if found := re.search(rf'{_FILE}", line (\d+)', each):
                yield int(found[1])
                return
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != str(_FILE):
        frame = frame.f_back
    if frame is not None:
        yield frame.f_lineno


def _born(source: str, lane: Lane, step: int) -> list[int]:
    births = _Births()
    with torch.autograd.set_detect_anomaly(True, check_nan=False), ExitStack() as listening:

        def at(number: int) -> None:
            if number == step:
                listening.enter_context(births)
            elif number == step + 1:
                listening.close()

        run(source, lane, at=at, file=_FILE)
    return births.lines
