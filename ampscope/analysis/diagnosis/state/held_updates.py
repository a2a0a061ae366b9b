"""Incidents of weights and optimizer state into which no update arrives, for their dtype rounds each away."""

from __future__ import annotations

from typing import Any

from ampscope.analysis.causes.catalogue import CATALOGUE, explanation
from ampscope.analysis.causes.cause_entry import Occurrence
from ampscope.analysis.causes.state import AverageHeld, StandsStill, WeightHeld
from ampscope.analysis.diagnosis.examined import Examined
from ampscope.analysis.results import Incident
from ampscope.trace.json_columns import details
from ampscope.trace.schema import IncidentRow, Phase, StateKind
from ampscope.trace.vocabulary import Cause


def examined_held(row: IncidentRow, rank: int) -> Examined:
    """What was held where it was, the one that lost most beside its spacing first."""
    evidence = details(row.evidence)
    found = evidence.get("held")
    known = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    first = max(known, key=_lost, default={})
    count = evidence.get("count")
    reason = _reason(first, others=(count if isinstance(count, int) else len(known)) - 1)
    cause = Cause.BF16_PRECISION if reason.dtype == "bfloat16" else Cause.HALF_PARAMS
    module = str(first.get("owner", "")).rpartition(".")[0]
    incident = Incident(
        step=reason.since,
        last_step=reason.last,
        severity=CATALOGUE[cause].severity,
        cause=cause,
        phase=Phase.OPTIMIZER,
        module=module,
        replay=row.replay,
        replay_reason=row.replay_reason,
        trigger=row.trigger,
        tripped=row.bad_params,
        explanation=explanation(cause, Occurrence(module=module, reason=reason)),
        rank=rank,
    )
    return Examined(incident, reason)


def _lost(found: dict[str, Any]) -> float:
    """What it lost, in spacings of its dtype."""
    return float(found.get("off_by") or 0.0) / (float(found.get("spacing") or 0.0) or 1.0)


def _reason(found: dict[str, Any], *, others: int) -> StandsStill:
    numbers = {key: float(found.get(key) or 0.0) for key in ("share", "value", "off_by", "update", "spacing")}
    counts = {key: int(found.get(key) or 0) for key in ("since", "last", "looks")}
    name, owner, dtype = (str(found.get(key, "")) for key in ("name", "owner", "dtype"))
    common: dict[str, Any] = {"name": name, "dtype": dtype, "others": others, **numbers, **counts}
    if found.get("kind") == StateKind.OPTIMIZER:
        return AverageHeld(owner=owner, **common)
    return WeightHeld(**common)
