"""What the diagnosis of a run names first, with the type that a test expects."""

from __future__ import annotations

from ampscope import diagnose
from ampscope.analysis.results import Incident
from ampscope.trace.read.run import Run


def primary_incident(run: Run) -> Incident:
    """The incident that is told first; a finding in its place, or nothing, fails the test."""
    primary = diagnose(run).primary
    assert isinstance(primary, Incident)
    return primary
