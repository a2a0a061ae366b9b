"""Failures of a loss scale as incidents, where no other incident explains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ampscope.analysis.cures.remedies import remedies
from ampscope.analysis.results import Incident, ScaleHealth
from ampscope.analysis.tables.step_history import History
from ampscope.trace.schema import Phase, Trigger
from ampscope.trace.vocabulary import Cause, Severity


def scale_incidents(
    found: Sequence[ScaleHealth], others: Sequence[Incident], history: Mapping[int, History]
) -> list[Incident]:
    """Failures of the scale that no incident of the same steps explains."""
    told = [each for each in others if each.severity is not Severity.INFO]
    return [
        _incident(health, history[health.optimizer])
        for health in found
        if health.severity is not Severity.INFO and not any(each.last_step >= health.first_step for each in told)
    ]


def _incident(health: ScaleHealth, history: History) -> Incident:
    return Incident(
        step=health.first_step,
        last_step=health.last_step,
        count=int(history.skipped[history.step >= health.first_step].sum()) or 1,
        severity=health.severity,
        cause=Cause.SCALE_OVERFLOW,
        phase=Phase.BACKWARD,
        trigger=Trigger.NONFINITE_GRADIENT,
        explanation=health.explanation,
        remedies=health.remedies or remedies(Cause.SCALE_OVERFLOW),
    )
