"""Knows an op that runs as it did before: a training step repeats itself, and is not described anew each time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.torch_support.user_line import Place
from ampscope.capture.tracing.operators import Operator
from ampscope.trace.schema import Phase

#: Arguments that can be compared with those of another time and keep nothing alive.
_PLAIN = frozenset(
    {bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)


class Circumstances(NamedTuple):
    """Where and under what an op runs."""

    operator: Operator
    phase: Phase
    module: str | None
    place: Place
    function: str  #: name of the torch function that the op belongs to
    autocast: torch.dtype | None
    grad_fn: str = ""
    forward_site: int | None = None


class _Execution(NamedTuple):
    """An op as it ran the last time in some place."""

    circumstances: Circumstances
    plain: tuple[tuple[int, Any], ...]  #: its arguments that hold no tensor, by position
    named: dict[str, Any]  #: those given by name
    operands: tuple[tuple[torch.Size, torch.dtype], ...]
    results: tuple[tuple[torch.Size, torch.dtype], ...]
    arguments: int
    site: int


class Repeats:
    """The last execution of each op in each place, and the site it has."""

    def __init__(self) -> None:
        self._last: dict[tuple[Any, ...], _Execution] = {}

    def site(
        self, now: Circumstances, args: Any, kwargs: dict[str, Any], operands: list[Tensor], results: list[Tensor]
    ) -> int | None:
        """The site of an op whose last execution was the same in all that makes a site; None where it was another."""
        last = self._last.get(_key(now, operands))
        if last is None or last.circumstances != now or last.arguments != len(args):
            return None
        if not (_are(operands, last.operands) and _are(results, last.results)):
            return None
        for index, value in last.plain:
            if type(args[index]) is not type(value) or args[index] != value:
                return None
        return last.site if kwargs == last.named else None

    def ran(
        self,
        now: Circumstances,
        args: Any,
        kwargs: dict[str, Any],
        operands: list[Tensor],
        results: list[Tensor],
        *,
        site: int,
    ) -> None:
        """Remembers an execution, where all that its site depends on can be compared with another's."""
        others = [(index, value) for index, value in enumerate(args) if not _holds_tensors(value)]
        if not all(_is_plain(value) for _, value in others) or not all(map(_is_plain, kwargs.values())):
            return
        if any(tensor.is_nested for tensor in (*operands, *results)):
            return  # it need not have a shape
        self._last[_key(now, operands)] = _Execution(
            now,
            tuple([(index, _kept(value)) for index, value in others]),
            {name: _kept(value) for name, value in kwargs.items()},
            tuple([(tensor.shape, tensor.dtype) for tensor in operands]),
            tuple([(tensor.shape, tensor.dtype) for tensor in results]),
            len(args),
            site,
        )


def _key(now: Circumstances, operands: list[Tensor]) -> tuple[Any, ...]:
    """What is looked up: little, and quick to hash."""
    shape = operands[0].shape if operands and not operands[0].is_nested else None
    return now.operator.name, now.module, now.place.line, now.forward_site, shape


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value)
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(type(item) in _PLAIN for item in value)
    return type(value) in _PLAIN


def _kept(value: Any) -> Any:
    """A list may be changed by who gave it."""
    return list(value) if isinstance(value, list) else value


def _are(tensors: list[Tensor], described: tuple[tuple[torch.Size, torch.dtype], ...]) -> bool:
    """Whether tensors have these shapes and dtypes."""
    if len(tensors) != len(described):
        return False
    for tensor, (shape, dtype) in zip(tensors, described, strict=True):
        if tensor.dtype is not dtype or tensor.is_nested or tensor.shape != shape:
            return False
    return True
