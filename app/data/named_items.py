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


def incident_at(diagnosis: Diagnosis, step: int, rank: int) -> tuple[str, Incident] | None:
    """The incident that a step of a rank belongs to, with its name; the worst first, one of its own before others'."""
    found = [
        (name, item)
        for name, item in named_items(diagnosis).items()
        if isinstance(item, Incident) and item.step <= step <= item.last_step and rank in _ranks(item)
    ]
    return min(found, key=lambda one: rank in one[1].received_by, default=None)


def _ranks(item: Incident) -> tuple[int, ...]:
    return (item.rank, *item.also_on, *item.received_by)
