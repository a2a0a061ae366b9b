"""The incident of a run that ended with an error: what the exception said of the call that raised it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ampscope.analysis.causes.catalogue import CATALOGUE, explanation
from ampscope.analysis.causes.cause_entry import Match, Occurrence
from ampscope.analysis.causes.outside import Raised
from ampscope.analysis.causes.overflow import Literal
from ampscope.analysis.diagnosis.examined import Examined
from ampscope.analysis.origin.step_graph import public_phase
from ampscope.analysis.results import Incident, Operand, SourceLine
from ampscope.trace.json_columns import details
from ampscope.trace.schema import IncidentRow, Phase
from ampscope.trace.vocabulary import Cause


def raised(row: IncidentRow, rank: int) -> Examined:
    """The incident of a step that an exception ended.

    Args:
        row: Its row, with `Trigger.EXCEPTION`.
        rank: The rank that recorded it.
    """
    told = details(row.evidence).get("exception")
    call: dict[str, Any] = told if isinstance(told, dict) else {}
    cause, reason = _cause(call)
    op, dtype = str(call.get("op", "")), str(call.get("dtype", ""))
    incident = Incident(
        step=row.step,
        last_step=row.step,
        severity=CATALOGUE[cause].severity,
        cause=cause,
        phase=public_phase(call.get("phase", Phase.FORWARD)),
        op=op,
        module=call.get("module", ""),
        module_type=call.get("module_type", ""),
        source=_source(call),
        inputs=(Operand(role="input 0", dtype=dtype, shape=""),) if dtype else (),
        replay=row.replay,
        replay_reason=row.replay_reason,
        trigger=row.trigger,
        explanation=explanation(cause, Occurrence(op=op, reason=reason)),
        rank=rank,
    )
    return Examined(incident, reason)


def led_to_error(examined: Examined, row: IncidentRow) -> Examined:
    """The origin of the values that an error spoke of, with what it said."""
    call = details(row.evidence)["exception"]
    said = f"{examined.incident.explanation} The error that it led to: {call.get('error')}: {call.get('message')}"
    return examined._replace(incident=replace(examined.incident, explanation=f"{said.rstrip(':. ')}."))


def _cause(call: dict[str, Any]) -> Match:
    value = call.get("value")
    if call.get("does_not_fit") and isinstance(value, float):
        return Match(Cause.LITERAL_OVERFLOW, Literal(value=value, dtype=str(call.get("dtype", "")), refused=True))
    said = Raised(error=str(call.get("error", "an error")), message=str(call.get("message", "")))
    return Match(Cause.LITERAL_OVERFLOW if call.get("does_not_fit") else Cause.EXCEPTION, said)


def _source(call: dict[str, Any]) -> SourceLine | None:
    if not call.get("file"):
        return None
    return SourceLine(file=call["file"], line=call["line"], function=call["function"], code=call["code"])
