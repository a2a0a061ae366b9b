"""The run on screen, kept in the session."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import streamlit as st

from ampscope.trace.remote.location import location
from data.run_snapshot import RunSnapshot, take_snapshot

_CURRENT = "_ampscope_run"


def select_run(path: Path) -> RunSnapshot:
    """Make ``path`` the run on screen, as it is on the disk now; the rank stays the one that was chosen in it.

    Raises:
        RunError: it cannot be read.
    """
    before = st.session_state.get(_CURRENT)
    rank = before.rank if isinstance(before, RunSnapshot) and before.path == str(path) else None
    st.session_state[_CURRENT] = take_snapshot(path, rank=rank)
    return current_run()


def select_rank(rank: int) -> RunSnapshot:
    """Make ``rank`` the one that the pages look at."""
    st.session_state[_CURRENT] = replace(current_run(), rank=rank)
    return current_run()


def current_run() -> RunSnapshot:
    """The run on screen; pages are only drawn when there is one."""
    run = st.session_state[_CURRENT]
    assert isinstance(run, RunSnapshot)
    return run


def refreshed_run() -> RunSnapshot:
    """The run on screen as it is on the disk now, for parts of a page that follow it."""
    return select_run(location(current_run().path))
