"""What is asked for one incident at a time, and what is made to be taken away: scripts and reports."""

from __future__ import annotations

import streamlit as st

from ampscope.analysis.diagnosis.reproducible import reproducible
from ampscope.analysis.origin.closeup import Closeup, closeup
from ampscope.analysis.results import Finding, Incident
from ampscope.errors import AmpscopeError
from ampscope.report.html.report_page import page
from ampscope.report.repro.script import ReproScript, as_script
from ampscope.trace.schema import Table
from data.loader import Loaded

_KEPT = 64
#: Scripts kept; each may hold as many bytes as a run keeps of one call.
_SCRIPTS = 2


def surroundings(loaded: Loaded, name: str, item: Incident | Finding) -> Closeup:
    """What lies around an item; ``name`` tells it from the others of its run."""
    traced = loaded.of((Table.OPS, Table.EDGES, Table.SITES))
    return _surroundings((loaded.path, traced, name), loaded, item)


def script(loaded: Loaded, incident: Incident) -> ReproScript | str:
    """The script that makes the call at an incident's origin again, or why there is none, in words."""
    try:
        number = loaded.diagnosis().incidents.index(incident) + 1
        return _script((loaded.path, loaded.stamp, number), loaded)
    except AmpscopeError as error:
        return str(error)


def report(loaded: Loaded) -> bytes:
    """The run as one HTML file."""
    return page(loaded.run, loaded.diagnosis()).encode()


@st.cache_resource(max_entries=_KEPT, show_spinner=False)
def _surroundings(key: tuple[str, str, str], _loaded: Loaded, _item: Incident | Finding) -> Closeup:  # noqa: ARG001
    return closeup(_loaded.run, _item)


@st.cache_resource(max_entries=_SCRIPTS, show_spinner=False)
def _script(key: tuple[str, str, int], _loaded: Loaded) -> ReproScript:
    diagnosis = _loaded.diagnosis()
    found = reproducible(_loaded.run, diagnosis, key[-1])
    try:
        content = found.saved.path.read_bytes()
    except OSError as error:
        raise AmpscopeError(f"{found.saved.path} cannot be read: {error.strerror or error}") from None
    return as_script(diagnosis.run, found, content)
