"""Numbers program points, so that each is described once in a trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ampscope.capture.torch_support.user_line import NOWHERE, Place
from ampscope.capture.tracing.executions import Met
from ampscope.trace.schema import Cast, SiteRow


class Signature(NamedTuple):
    """Dtypes and shapes of the tensors of an op."""

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]


NO_TENSORS = Signature((), ())


class SiteKey(NamedTuple):
    """The identity of a site: two executions with equal fields belong to the same one."""

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

    Attributes:
        first: Number of the first site.
        met: The circumstances under which ops ran, and what is known of those that run under them again.
        entries: Numbers of the sites of values from outside the steps, by all that makes one another.
    """

    def __init__(self, first: int, module_type: Callable[[str], str]) -> None:
        self.met = Met()
        self.entries: dict[tuple[Any, ...], int] = {}
        self._ids: dict[SiteKey, int] = {}
        self._points: list[SiteKey] = []
        self._looked_at = 0  # of these, for the dtypes of their results
        self._computed_in: set[torch.dtype | None] = set()
        self._rows: list[SiteRow] = []  # of the first of these; made when asked for, each once
        self.first = first
        self._module_type = module_type
        self._handed_over = 0

    def __len__(self) -> int:
        return len(self._points)

    def __iter__(self) -> Iterator[SiteKey]:
        return iter(self._points)

    def number(self, point: SiteKey) -> int:
        """The number of a site, a new one when it is first seen."""
        known = self._ids.get(point)
        if known is None:
            known = self.first + len(self._points)
            # Before its number: a signal that comes between the two must not give that out twice.
            self._points.append(point)
            self._ids[point] = known
        return known

    def point(self, site: int) -> SiteKey:
        """The site with a number."""
        return self._points[site - self.first]

    def computed_in(self) -> frozenset[torch.dtype | None] | None:
        """The dtypes of the results of all ops seen so far; None where none was seen."""
        for point in self._points[self._looked_at :]:
            self._computed_in |= {*point.outputs.dtypes}
        self._looked_at = len(self._points)
        return frozenset(self._computed_in) if self._points else None

    def new_rows(self) -> list[SiteRow]:
        """Rows of the sites seen since the last call."""
        rows = [self._row(index) for index in range(self._handed_over, len(self._points))]
        self._handed_over += len(rows)
        return rows

    def row(self, site: int) -> SiteRow:
        """The trace's row for a site."""
        return self._row(site - self.first)

    def _row(self, index: int) -> SiteRow:
        while len(self._rows) <= index:
            self._rows.append(self._described(len(self._rows)))
        return self._rows[index]

    def _described(self, index: int) -> SiteRow:
        point = self._points[index]
        return SiteRow(
            site=self.first + index,
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
