"""Numbers program points, so that each is described once in a trace, and knows one that it has met."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.torch_support.user_line import NOWHERE, Place
from ampscope.capture.tracing.operators import Operator
from ampscope.trace.schema import Cast, Phase, SiteRow

#: Arguments that can be compared with those of another time and keep nothing alive.
_PLAIN = frozenset(
    {bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)


class Signature(NamedTuple):
    """Dtypes and shapes of the tensors of an op."""

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]


NO_TENSORS = Signature((), ())


class Point(NamedTuple):
    """What makes two executions the same site."""

    op: str
    module: str = ""
    phase: str = ""
    place: Place = NOWHERE
    inputs: Signature = NO_TENSORS
    outputs: Signature = NO_TENSORS
    scalars: tuple[tuple[str, Any], ...] = ()
    autocast: torch.dtype | None = None
    cast: Cast = Cast.NONE
    grad_fn: str = ""
    forward_site: int | None = None
    name: str = ""


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


def dtype_name(dtype: torch.dtype | None) -> str:
    """``float16`` for ``torch.float16``; empty for None."""
    return str(dtype).removeprefix("torch.") if dtype is not None else ""


def shape_name(shape: tuple[int, ...]) -> str:
    """``8x128x512``; empty for a scalar tensor."""
    return "x".join(map(str, shape))


class Sites:
    """The sites seen so far, and rows for those not yet handed over.

    Args:
        first: Number of the first site; a resumed run continues its numbering.
        module_type: Class name of the module with a qualified name.
    """

    def __init__(self, first: int, module_type: Callable[[str], str]) -> None:
        self.repeats = Repeats()
        self._ids: dict[Point, int] = {}
        self._points: list[Point] = []
        self._rows: list[SiteRow] = []  # of the first of these; made when asked for, each once
        self._first = first
        self._module_type = module_type
        self._handed_over = 0

    def number(self, point: Point) -> int:
        """The number of a site, a new one when it is first seen."""
        known = self._ids.get(point)
        if known is None:
            known = self._ids[point] = self._first + len(self._points)
            self._points.append(point)
        return known

    def point(self, site: int) -> Point:
        """The site with a number."""
        return self._points[site - self._first]

    def computed_in(self) -> frozenset[torch.dtype | None] | None:
        """The dtypes of the results of all ops seen so far; None where none was seen."""
        return frozenset(chain.from_iterable(point.outputs.dtypes for point in self._points)) if self._points else None

    def new_rows(self) -> list[SiteRow]:
        """Rows of the sites seen since the last call."""
        before, self._handed_over = self._handed_over, len(self._points)
        return [self._row(index) for index in range(before, self._handed_over)]

    def row(self, site: int) -> SiteRow:
        """The trace's row for a site."""
        return self._row(site - self._first)

    def _row(self, index: int) -> SiteRow:
        while len(self._rows) <= index:
            self._rows.append(self._described(len(self._rows)))
        return self._rows[index]

    def _described(self, index: int) -> SiteRow:
        point = self._points[index]
        return SiteRow(
            site=self._first + index,
            op=point.op,
            name=point.name,
            module=point.module,
            module_type=self._module_type(point.module),
            phase=point.phase,
            file=point.place.file,
            line=point.place.line,
            function=point.place.function,
            code=point.place.text,
            in_dtypes=tuple(map(dtype_name, point.inputs.dtypes)),
            in_shapes=tuple(map(shape_name, point.inputs.shapes)),
            out_dtypes=tuple(map(dtype_name, point.outputs.dtypes)),
            out_shapes=tuple(map(shape_name, point.outputs.shapes)),
            scalars=json.dumps({name: _plain(value) for name, value in point.scalars}),
            autocast=dtype_name(point.autocast),
            cast=point.cast,
            grad_fn=point.grad_fn,
            forward_site=point.forward_site,
        )


def _plain(value: Any) -> Any:
    """A JSON value for a scalar argument; infinities and dtypes as text."""
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return str(value)
