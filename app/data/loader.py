"""Results of analysis for the run on screen, computed once and again only when what they are made of has new rows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from ampscope.analysis.diagnosis.diagnosis import diagnose
from ampscope.analysis.overview.overview import Overview, overview
from ampscope.analysis.overview.pulse import Pulse, pulse
from ampscope.analysis.precision.precision import Precision, precision
from ampscope.analysis.results import Diagnosis
from ampscope.analysis.scale.scale_history import ScaleHistory, scale_history
from ampscope.analysis.scale.skipped_steps import SkippedStep, skipped_steps
from ampscope.analysis.scale.what_if import ScaleRecord
from ampscope.trace.manifest import read_manifest
from ampscope.trace.read.run import Run, open_run
from ampscope.trace.schema import Table

_CURRENT = "_ampscope_run"
#: Results kept over all runs and sessions.
_KEPT = 64
#: Runs kept open.
_OPEN = 16
#: What can change the verdict at once; the rest counts once the run has grown by a fifth.
_ALARMING = (Table.INCIDENTS, Table.REPLAYS, Table.FINDINGS)
_HISTORY = (Table.STEPS, Table.SCALER_EVENTS, Table.EVENTS)
_TRACED = (Table.OPS, Table.EDGES, Table.SITES)
_GROWTHS_PER_DOUBLING = 4


@dataclass(frozen=True, slots=True)
class Loaded:
    """A run at one moment; asking for a result reads it, or finds it read."""

    path: str
    stamp: str  #: another one whenever the run has new rows
    status: str  #: ``open``, ``closed`` or ``interrupted``
    created: float  #: unix time, seconds; another run in the same folder has another
    stamps: tuple[tuple[str, int], ...]  #: by table

    @property
    def is_open(self) -> bool:
        """Whether a process is writing it."""
        return self.status == "open"

    @property
    def run(self) -> Run:
        """The run, kept open, so that a look at it reads only what is new."""
        return _opened(self.path, self.created)

    def of(self, tables: Iterable[Table]) -> str:
        """What changes whenever one of ``tables`` has new rows."""
        known = dict(self.stamps)
        return "-".join(str(known[table]) for table in tables)

    def pulse(self) -> Pulse:
        """Whether it is alive."""
        return _pulse(self, self.of((Table.STEPS, *_ALARMING)), self.status, self.path)

    def diagnosis(self) -> Diagnosis:
        """The verdict; on a run being written up to a fifth of it older than the rest, but for new incidents."""
        return _diagnosis(self, self._verdict_stamp(), self.path)

    def overview(self, optimizer: int | None = None) -> Overview:
        """The time line and the tiles."""
        return _overview(self, self.of(_HISTORY), self.path, optimizer)

    def scale(self, optimizer: int | None = None) -> ScaleHistory:
        """The scaler's history."""
        return _scale(self, self.of(_HISTORY), self.path, optimizer)

    def skips(self, optimizer: int | None = None) -> tuple[SkippedStep, ...]:
        """The skipped steps, the newest first."""
        return _skips(self, self.of((*_HISTORY, Table.GRADS, Table.INCIDENTS)), self.path, optimizer)

    def scale_record(self, optimizer: int | None = None) -> ScaleRecord:
        """What each step told of the loss scale, to ask what would have been."""
        return _scale_record(self, self.of((Table.STEPS,)), self.path, optimizer)

    def precision(self, step: int | None = None, source: str | None = None) -> Precision:
        """The precision of a traced step."""
        return _precision(self, self.of(_TRACED), self.path, step, source)

    def _verdict_stamp(self) -> str:
        if not self.is_open:
            return self.stamp
        grown = math.floor(_GROWTHS_PER_DOUBLING * math.log2(1 + self.pulse().steps))
        return f"{self.of(_ALARMING)} {grown}"


def choose(path: Path) -> Loaded:
    """Make ``path`` the run on screen, as it is on the disk now.

    Raises:
        RunError: it cannot be read.
    """
    st.session_state[_CURRENT] = look(path)
    return current()


def current() -> Loaded:
    """The run on screen; pages are only run when there is one."""
    chosen = st.session_state[_CURRENT]
    assert isinstance(chosen, Loaded)
    return chosen


def newest() -> Loaded:
    """The run on screen as it is on the disk now, for parts of a page that follow it."""
    return choose(Path(current().path))


def look(path: Path) -> Loaded:
    """The run in ``path`` at this moment.

    Raises:
        RunError: it cannot be read.
    """
    created = read_manifest(path).created
    run = _opened(str(path), created)
    stamps = tuple((str(table), hash(run.stamp(table))) for table in Table)
    return Loaded(str(path), str(hash(stamps)), run.status, created, stamps)


@st.cache_resource(max_entries=_OPEN, show_spinner=False)
def _opened(path: str, created: float) -> Run:  # noqa: ARG001  part of the cache's key, as below
    return open_run(path)


@st.cache_resource(max_entries=_KEPT, show_spinner=False)
def _pulse(_loaded: Loaded, stamp: str, status: str, path: str) -> Pulse:  # noqa: ARG001
    return pulse(_loaded.run)


@st.cache_resource(max_entries=_KEPT, show_spinner=False)
def _diagnosis(_loaded: Loaded, stamp: str, path: str) -> Diagnosis:  # noqa: ARG001
    return diagnose(_loaded.run)


@st.cache_resource(max_entries=_KEPT, show_spinner=False)
def _overview(_loaded: Loaded, stamp: str, path: str, optimizer: int | None) -> Overview:  # noqa: ARG001
    return overview(_loaded.run, optimizer=optimizer)


@st.cache_resource(max_entries=_KEPT, show_spinner=False)
def _scale(_loaded: Loaded, stamp: str, path: str, optimizer: int | None) -> ScaleHistory:  # noqa: ARG001
    return scale_history(_loaded.run, optimizer=optimizer)


@st.cache_resource(max_entries=_KEPT, show_spinner=False)
def _skips(_loaded: Loaded, stamp: str, path: str, optimizer: int | None) -> tuple[SkippedStep, ...]:  # noqa: ARG001
    return skipped_steps(_loaded.run, optimizer=optimizer)


@st.cache_resource(max_entries=_KEPT, show_spinner=False)
def _scale_record(_loaded: Loaded, stamp: str, path: str, optimizer: int | None) -> ScaleRecord:  # noqa: ARG001
    return ScaleRecord.of(_loaded.run, optimizer=optimizer)


@st.cache_resource(max_entries=_KEPT, show_spinner=False)
def _precision(_loaded: Loaded, stamp: str, path: str, step: int | None, source: str | None) -> Precision:  # noqa: ARG001
    return precision(_loaded.run, step=step, source=source)
