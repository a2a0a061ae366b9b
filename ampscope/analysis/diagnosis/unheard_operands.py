"""Judges whether calls before a step, which nobody heard in it, may have made its operand bad of finite numbers."""

from __future__ import annotations

from dataclasses import replace

from ampscope.analysis.causes import cause_entry
from ampscope.analysis.causes.outside import CameIn
from ampscope.analysis.causes.unknown import Observed
from ampscope.analysis.diagnosis.examined import Examined
from ampscope.trace.dtypes import HALF_DTYPES
from ampscope.trace.evidence import EarlierCall, Evidence
from ampscope.trace.schema import IncidentRow
from ampscope.trace.vocabulary import Cause

#: Functions that give another dtype and change nothing else: of finite numbers they make infinities, and no NaN.
_CASTS = frozenset({"to", "half", "type", "type_as"})


def perhaps_made(row: IncidentRow, examined: Examined) -> Examined:
    """An incident of a bad batch, or one of no known cause where half precision may have made it of a good one."""
    incident, reason = examined.incident, examined.reason
    if incident.cause is not Cause.BAD_INPUT or not isinstance(reason, CameIn) or reason.carried:
        return examined
    made = Evidence.of(row).made_before.get(reason.name)
    if made is None or not made.calls:
        return examined
    infinities = any(each.statistics.posinf or each.statistics.neginf for each in incident.outputs)
    by = next((each for each in reversed(made.calls) if _may_make(each, infinities=infinities)), None)
    if by is None:
        text = f"{incident.explanation} The loop prepares it at {_place(made.calls[-1])}."
        return examined._replace(incident=replace(incident, explanation=text))
    text = (
        f"{incident.explanation} The loop computes it by {by.name} in {by.dtype} at {_place(by)}, as seen at step "
        f"{made.step:,}. In this step that was not followed: whether it was given bad numbers or made them is not "
        "known."
    )
    check = f"Find out which it is: check what line {by.line} is given, and what it gives."
    code = "assert x.isfinite().all(), 'non-finite before this line'"
    wide = cause_entry.advice(cause_entry.BEFORE, f"Compute what line {by.line} computes in float32.")
    reason = Observed(sentence=text, advice=(cause_entry.advice(cause_entry.BATCH, check, code), wide))
    return examined._replace(incident=replace(incident, cause=Cause.UNKNOWN, explanation=text), reason=reason)


def _place(call: EarlierCall) -> str:
    return f"{call.file.rpartition('/')[2]}:{call.line}"


def _may_make(call: EarlierCall, *, infinities: bool) -> bool:
    """Whether a call may return infinities, or NaN, of finite numbers for want of range or precision."""
    return call.dtype in HALF_DTYPES and (call.name not in _CASTS or (call.dtype == "float16" and infinities))
