"""Incidents that a look at the state gave: what outlives a step was not finite after it, though nothing had told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ampscope.analysis.causes.catalogue import CATALOGUE, explanation
from ampscope.analysis.causes.cause_entry import Occurrence
from ampscope.analysis.causes.state import TurnedBad
from ampscope.analysis.diagnosis.examined import Examined
from ampscope.analysis.results import Incident
from ampscope.trace.json_columns import details
from ampscope.trace.schema import IncidentRow, Phase, StateKind
from ampscope.trace.vocabulary import Cause, Severity

_CAUSES: dict[str, Cause] = {
    StateKind.OPTIMIZER: Cause.BAD_OPTIMIZER_STATE,
    StateKind.WEIGHT: Cause.BAD_WEIGHT,
    StateKind.BUFFER: Cause.BAD_BUFFER,
    StateKind.CARRIED: Cause.BAD_BUFFER,
}


def state_found(row: IncidentRow) -> TurnedBad | None:
    """What of the state was found bad, the worst first told; None for an incident that is none of the state's."""
    found = details(row.evidence).get("state")
    tensors = [_turned(each) for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    known = [each for each in tensors if each.kind in _CAUSES]
    if not known:
        return None
    first = min(known, key=lambda each: (each.bad_at, list(_CAUSES).index(StateKind(each.kind))))
    values = {name: getattr(first, name) for name in TurnedBad.__slots__}
    return TurnedBad(**{**values, "others": len(known) - 1})


def _turned(found: Mapping[str, Any]) -> TurnedBad:
    finite_at = found.get("finite_at")
    return TurnedBad(
        kind=str(found.get("kind", "")),
        name=str(found.get("name", "")),
        owner=str(found.get("owner", "")),
        module=str(found.get("module", "")),
        dtype=str(found.get("dtype", "")),
        nan=_count(found, "nan"),
        inf=_count(found, "inf"),
        numel=_count(found, "numel"),
        finite_at=finite_at if isinstance(finite_at, int) else None,
        bad_at=_count(found, "bad_at"),
    )


def _count(found: Mapping[str, Any], key: str) -> int:
    value = found.get(key)
    return value if isinstance(value, int) else 0


def examined_state(row: IncidentRow, reason: TurnedBad, rank: int) -> Examined:
    """The incident of state that was found bad after a step, without the op that wrote it."""
    cause = _CAUSES[reason.kind]
    written_by_optimizer = reason.kind in (StateKind.OPTIMIZER, StateKind.WEIGHT)
    incident = Incident(
        step=reason.bad_at,
        last_step=reason.bad_at,
        count=1,
        severity=CATALOGUE[cause].severity,
        cause=cause,
        phase=Phase.OPTIMIZER if written_by_optimizer else Phase.FORWARD,
        op="",
        module=reason.module,
        module_type="",
        source=None,
        replay=row.replay,
        replay_reason=row.replay_reason,
        trigger=row.trigger,
        tripped=row.bad_params,
        explanation=explanation(cause, Occurrence(module=reason.module, reason=reason)),
        rank=rank,
    )
    return Examined(incident, reason)


def without_consequences(examined: Iterable[Examined]) -> Iterator[Examined]:
    """All but state that an incident explains: one while it was not looked at, or the last before that look."""
    known = list(examined)
    errors = [
        (each.incident.rank, each.incident.step)
        for each in known
        if each.incident.severity is Severity.ERROR and not isinstance(each.reason, TurnedBad)
    ]
    for each in known:
        if not isinstance(each.reason, TurnedBad) or not _is_explained(each.incident.rank, each.reason, errors):
            yield each


def _is_explained(rank: int, reason: TurnedBad, errors: Iterable[tuple[int, int]]) -> bool:
    since = -1 if reason.finite_at is None else reason.finite_at
    return any(where == rank and since < step <= reason.bad_at for where, step in errors)
