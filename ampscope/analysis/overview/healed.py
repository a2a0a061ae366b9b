"""What healing has changed in a run, and whether a failure has come back since something was changed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ampscope.analysis.results import Finding, Incident, MadeCure
from ampscope.analysis.tables.step_history import History
from ampscope.trace.read.run import Run
from ampscope.trace.schema import CureKind, EventKind, EventRow, Table, said
from ampscope.trace.vocabulary import Severity

#: What a look after a step has found is mended before the next one.
_AFTER = CureKind.STATE


def cures_made(run: Run, rank: int) -> tuple[MadeCure, ...]:
    """The changes that healing has made on a rank, in order."""
    lifted: dict[tuple[int, str], tuple[int, str]] = {}
    for row in run.rows(Table.EVENTS, rank=rank, kind=EventKind.CURE_LIFTED):
        detail = _detail(row)
        key = _number(detail.get("cure")), str(detail.get("kind", ""))
        lifted.setdefault(key, (row.step, str(detail.get("text", ""))))
    made = []
    for row in run.rows(Table.EVENTS, rank=rank, kind=EventKind.CURE):
        detail = _detail(row)
        kind = said(CureKind, str(detail.get("kind", "")), CureKind.MODULES_FP32)
        lifted_at, because = lifted.get((row.step, kind), (None, ""))
        made.append(
            MadeCure(
                step=row.step,
                kind=kind,
                modules=tuple(map(str, detail.get("modules", ()))),
                code=str(detail.get("code", "")),
                lifted_at=lifted_at,
                lifted_because=because,
                lost=str(detail.get("lost", "")),
                at_once=bool(detail.get("at_once")),
                text=str(detail.get("text", "")),
                applied=bool(detail.get("applied")),
                optimizer=_number(detail.get("optimizer")),
            )
        )
    return tuple(sorted(made, key=lambda each: each.step))


def since_then(
    run: Run,
    rank: int,
    primary: Incident | Finding | None,
    *,
    incidents: Sequence[Incident],
    cures: Sequence[MadeCure],
    history: Mapping[int, History],
) -> str:
    """Whether what is told first has come back since the run was resumed, or it was healed; empty where neither was.

    Args:
        run: The run.
        rank: Whose steps are counted.
        primary: What is told first.
        incidents: Everything that went wrong.
        cures: What healing has changed.
        history: The steps, by optimizer.
    """
    if not isinstance(primary, Incident) or primary.cause.is_ahead:
        return ""
    resumes = [row.step for row in run.rows(Table.EVENTS, rank=rank, kind=EventKind.RESUME) if row.step > primary.step]
    of_others = [each for each in incidents if each is not primary]
    healed = [
        each.step
        for each in cures
        if primary.step <= each.step <= primary.last_step + (each.kind == _AFTER)
        and (_is_of(primary, each.step) or not any(_is_of(other, each.step) for other in of_others))
    ]
    if resumes:
        at, what = max(resumes), f"The run was resumed at step {max(resumes):,}"
        back = primary.last_step >= at
    elif healed:
        at, what = healed[0] + 1, f"Healing changed the training at step {healed[0]:,}"
        back = primary.last_step >= at
    else:
        return ""
    if back:
        return f"{what}, and the failure has come back since: at step {primary.last_step:,}."
    steps = sum(each.step.size for each in history.values())
    later = sum(int((each.step >= at).sum()) for each in history.values())
    made = "step" if later == 1 else f"{later:,} steps"
    share = f", {100 * later / steps:.0f} % of the run" if steps else ""
    others = (each.step for each in incidents if each is not primary and each.severity is Severity.ERROR)
    other = next((step for step in sorted(others) if step >= at), None)
    also = f"; another failure came at step {other:,}" if other is not None else ""
    return f"{what}, and the failure has not come back in the {made} since{share}{also}." if later else ""


def _is_of(incident: Incident, step: int) -> bool:
    """Whether a step is known to be one of an incident's."""
    is_each = incident.count == incident.last_step - incident.step + 1
    return step in (incident.step, incident.last_step) or (is_each and incident.step < step < incident.last_step)


def _detail(row: EventRow) -> dict[str, Any]:
    try:
        detail = json.loads(row.text)
    except ValueError:
        return {}
    return detail if isinstance(detail, dict) else {}


def _number(value: Any) -> int:
    return value if isinstance(value, int) else -1
