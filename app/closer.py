"""What is asked for one incident at a time, and what is made to be taken away: scripts and reports."""

from __future__ import annotations

from pathlib import Path

import streamlit as st
from loader import Loaded

from ampscope.analysis.closeup import Closeup, closeup
from ampscope.analysis.repro import Reproducible, reproducible
from ampscope.analysis.results import Finding, Incident
from ampscope.errors import AmpscopeError
from ampscope.report.html.page import page_of
from ampscope.report.repro import ReproScript, as_script
from ampscope.trace.reader import open_run

_KEPT = 64


def surroundings(loaded: Loaded, name: str, item: Incident | Finding) -> Closeup:
    """What lies around an item; ``name`` tells it from the others of its run."""
    return _surroundings(loaded.path, loaded.stamp, name, item)


@st.cache_resource(max_entries=_KEPT, show_spinner=False)
def _surroundings(path: str, stamp: str, name: str, _item: Incident | Finding) -> Closeup:  # noqa: ARG001  cache key
    with open_run(path) as run:
        return closeup(run, _item)


def kept_call(loaded: Loaded, incident: Incident) -> Reproducible | str:
    """The kept operands of an incident's op, or why there are none, in words."""
    diagnosis = loaded.diagnosis()
    try:
        with open_run(loaded.path) as run:
            return reproducible(run, diagnosis, diagnosis.incidents.index(incident) + 1)
    except AmpscopeError as error:
        return str(error)


def script(loaded: Loaded, kept: Reproducible) -> ReproScript:
    """The script that calls the op again."""
    return as_script(loaded.diagnosis().run, kept.saved, kept.saved.path.read_bytes())


def report(path: str) -> bytes:
    """The run as one HTML file, as it is on the disk now."""
    return page_of(Path(path)).encode()
