"""Files to take away from a page: the report, and a script with the failed op."""

from __future__ import annotations

from ampscope.analysis.replay.reproducible import reproducible
from ampscope.analysis.results import Incident
from ampscope.errors import AmpscopeError
from ampscope.report.html.report_page import page
from ampscope.report.repro import ReproScript, as_script
from ampscope.trace.schema import Table
from data.cache import cached, rows_of
from data.run_results import diagnosis_of
from data.run_snapshot import RunSnapshot

#: Scripts kept; each may hold as many bytes as a run keeps of one call.
_SCRIPTS = 2


def html_report(run: RunSnapshot) -> bytes:
    """The run as one HTML file."""
    return page(run.run, diagnosis_of(run)).encode()


def repro_script(run: RunSnapshot, incident: Incident) -> ReproScript | str:
    """The script that makes the call at an incident's origin again, or why there is none, in words."""
    try:
        return _script_of(run, diagnosis_of(run).incidents.index(incident) + 1)
    except AmpscopeError as error:
        return str(error)


@cached(rows_of(*Table), entries=_SCRIPTS, of_rank=False)
def _script_of(run: RunSnapshot, number: int) -> ReproScript:
    """The script for the incident with this ``number``, from 1."""
    diagnosis = diagnosis_of(run)
    found = reproducible(run.run, diagnosis, number)
    return as_script(diagnosis.run, found, found.saved.content())
