"""Operands that are kept away from where an op is not defined, or infinite."""

from __future__ import annotations

from collections.abc import Iterator

from ampscope.capture.replay.cures.forms.call_form import CallForm, OperandBound
from ampscope.capture.replay.cures.forms.failed_call import FailedCall
from ampscope.trace.dtypes import FINFO

_LOGARITHMS = frozenset({"log", "log2", "log10"})


def of_logarithm(call: FailedCall) -> Iterator[CallForm]:
    """The operand kept away from zero, by a bound that its dtype holds."""
    if call.name not in _LOGARITHMS:
        return
    dtype = next(iter(call.site.in_dtypes), "")
    if dtype in FINFO:
        yield OperandBound(frozenset({call.name}), 0, FINFO[dtype].smallest_normal, lowest=True)
