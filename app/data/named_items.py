"""Incidents and findings by a short name for the page's address."""

from __future__ import annotations

from ampscope.analysis.results import Diagnosis, Finding, Incident
from ampscope.report.html.report_page import most_urgent_first

Item = Incident | Finding


def named_items(diagnosis: Diagnosis) -> dict[str, Item]:
    """Everything noticed by name; what to read first comes first, harmless things last."""
    named: dict[str, Item] = {}
    for item in most_urgent_first(diagnosis):
        name = f"{item.step}-{item.cause.value}"
        named[name if name not in named else f"{name}-{len(named)}"] = item
    return named


def incident_at(diagnosis: Diagnosis, step: int) -> tuple[str, Incident] | None:
    """The incident that a step belongs to, with its name; the worst first."""
    for name, item in named_items(diagnosis).items():
        if isinstance(item, Incident) and item.step <= step <= item.last_step:
            return name, item
    return None
