"""Results of analysis for the run on screen, computed once and again only when the run has new rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from ampscope.analysis.diagnosis import diagnose
from ampscope.analysis.overview import Overview, overview
from ampscope.analysis.precision import Precision, precision
from ampscope.analysis.results import Diagnosis
from ampscope.analysis.scale import ScaleHistory, scale_history
from ampscope.trace.reader import open_run

_CURRENT = "_ampscope_run"
#: Results kept over all runs and sessions.
_KEPT = 64


@dataclass(frozen=True, slots=True)
class Loaded:
    """A run at one moment; asking for a result reads it, or finds it read."""

    path: str
    stamp: str  #: changes whenever a file of the run does

    def diagnosis(self) -> Diagnosis:
        """The verdict."""
        return _diagnosis(self.path, self.stamp)

    def overview(self, optimizer: int | None = None) -> Overview:
        """The time line and the tiles."""
        return _overview(self.path, self.stamp, optimizer)

    def scale(self, optimizer: int | None = None) -> ScaleHistory:
        """The scaler's history."""
        return _scale(self.path, self.stamp, optimizer)

    def precision(self, step: int | None = None, source: str | None = None) -> Precision:
        """The precision of a traced step."""
        return _precision(self.path, self.stamp, step, source)


def choose(path: Path) -> Loaded:
    """Make ``path`` the run on screen, as it is on the disk now."""
    st.session_state[_CURRENT] = Loaded(str(path), stamp_of(path))
    return current()


def current() -> Loaded:
    """The run on screen; pages are only run when there is one."""
    chosen = st.session_state[_CURRENT]
    assert isinstance(chosen, Loaded)
    return chosen


def stamp_of(path: Path) -> str:
    """The number, size and age of the run's files."""
    states = list(_states(path))
    return f"{len(states)}-{sum(size for size, _ in states)}-{max((age for _, age in states), default=0)}"


def _states(path: Path) -> Iterator[tuple[int, int]]:
    for file in path.rglob("*"):
        try:
            state = file.stat()
        except FileNotFoundError:  # sealed, or dropped by the budget, while this looks
            continue
        yield state.st_size, state.st_mtime_ns


@st.cache_resource(max_entries=_KEPT, show_spinner="Reading the run")
def _diagnosis(path: str, stamp: str) -> Diagnosis:  # noqa: ARG001  the stamp is part of the cache's key
    return diagnose(path)


@st.cache_resource(max_entries=_KEPT, show_spinner="Reading the run")
def _overview(path: str, stamp: str, optimizer: int | None) -> Overview:  # noqa: ARG001
    with open_run(path) as run:
        return overview(run, optimizer=optimizer)


@st.cache_resource(max_entries=_KEPT, show_spinner="Reading the run")
def _scale(path: str, stamp: str, optimizer: int | None) -> ScaleHistory:  # noqa: ARG001
    with open_run(path) as run:
        return scale_history(run, optimizer=optimizer)


@st.cache_resource(max_entries=_KEPT, show_spinner="Reading the run")
def _precision(path: str, stamp: str, step: int | None, source: str | None) -> Precision:  # noqa: ARG001
    with open_run(path) as run:
        return precision(run, step=step, source=source)
