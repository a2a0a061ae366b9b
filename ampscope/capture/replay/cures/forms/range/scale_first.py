"""A product whose factor is made small before, where the code makes the result small after."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ampscope.capture.replay.cures.forms.call_form import Call, CallForm
from ampscope.capture.replay.cures.forms.failed_call import FailedCall
from ampscope.provenance import op_name
from ampscope.trace.dtypes import FINFO
from ampscope.trace.schema import Form, Phase

_PRODUCTS = frozenset({"matmul", "mm", "bmm"})
#: What a product of several dimensions is reshaped with.
_VIEWS = frozenset({"view", "_unsafe_view", "reshape"})
_SCALINGS = frozenset({"mul", "div"})


class ScaleFirst(CallForm):
    """``(a * s) @ b`` for ``(a @ b) * s``; a division likewise.

    Args:
        factor: The number.
    """

    form = Form.SCALE_FIRST

    def __init__(self, factor: float) -> None:
        super().__init__(_PRODUCTS, argument=0, value=factor)
        self._factor = factor
        self._product: Tensor | None = None

    def instead(self, call: Call) -> Any:
        """See `CallForm.instead`; of the scaling after it, the product as it is."""
        if call.name in _SCALINGS:
            product, self._product = self._product, None
            return product
        self._product = call.with_operand(0, call.operands[0] * self._factor)()
        return self._product

    def belongs(self, call: Call) -> bool:
        """See `CallForm.belongs`: the scaling of that product."""
        if self._product is None or call.name not in _SCALINGS or len(call.operands) < 2:
            return False
        one, other = call.operands[:2]
        mirrored = call.name == "mul" and other is self._product and isinstance(one, (int, float))
        return mirrored or (one is self._product and isinstance(other, (int, float)))

    def before(self, call: Call) -> Any:
        """See `CallForm.before`: the product, scaled after."""
        return call() * self._factor


def of_product(call: FailedCall) -> Iterator[CallForm]:
    """The scale of a product put on its first factor, where the product alone leaves the range and scaled would not."""
    if call.in_backward or call.name not in ("mm", "bmm"):
        return
    factor = _scaling(call)
    if factor is None or not 0 < abs(factor) < 1:
        return
    limit = FINFO.get(next(iter(call.site.out_dtypes), ""))
    row = call.wide
    ends = [abs(end) for end in (row.min, row.max) if end is not None] if row is not None else []
    if limit is None or any(math.isfinite(end) and end * abs(factor) > limit.max for end in ends):
        return
    yield ScaleFirst(factor)


def _scaling(call: FailedCall) -> float | None:
    """The number by which the only reader multiplies the result of a product; None where it does something else."""
    reader, seq = None, call.seq
    while reader is None:
        readers = {edge.seq for edge in call.graph.readers[seq] if call.graph.site(edge.seq).phase != Phase.BACKWARD}
        if len(readers) != 1:
            return None
        (seq,) = readers
        reader = None if op_name(call.graph.site(seq).op) in _VIEWS else seq
    name, number = op_name(call.graph.site(reader).op), call.graph.scalars(reader).get("other")
    if not isinstance(number, (int, float)) or isinstance(number, bool) or not number:
        return None
    return {"mul": float(number), "div": 1 / number}.get(name)
