"""A run as it is on the disk at one moment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from ampscope.analysis.overview.ranks.world import World, sampled_rank, world_of
from ampscope.trace.manifest import read_manifest
from ampscope.trace.read.run import Run, open_run
from ampscope.trace.schema import Table

#: Runs kept open.
_OPEN = 16


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The identity of a run, whatever is added to it."""

    path: str
    created: float  #: unix time, seconds; another run in the same folder has another


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run at one moment: where it is, the rank looked at, and of each table a stamp that changes with its rows."""

    identity: RunIdentity
    status: str  #: ``open``, ``closed`` or ``interrupted``
    stamps: tuple[tuple[Table, int], ...]
    rank: int  #: the rank that the pages look at
    world: World  #: its ranks

    @property
    def path(self) -> str:
        """The run's folder."""
        return self.identity.path

    @property
    def created(self) -> float:
        """When it began, unix time in seconds."""
        return self.identity.created

    @property
    def is_open(self) -> bool:
        """Whether a process is writing it."""
        return self.status == "open"

    @property
    def run(self) -> Run:
        """The run, kept open, so that a look at it reads only what is new."""
        return _opened(self.identity)

    def stamps_of(self, tables: Iterable[Table]) -> tuple[int, ...]:
        """Returns stamps that change whenever one of ``tables`` has new rows."""
        known = dict(self.stamps)
        return tuple(known[table] for table in tables)


def take_snapshot(path: Path, *, rank: int | None = None) -> RunSnapshot:
    """The run in ``path`` at this moment.

    Args:
        path: Its folder.
        rank: The rank to look at; by default the first whose steps were traced.

    Raises:
        RunError: it cannot be read.
    """
    identity = RunIdentity(str(path), read_manifest(path).created)
    run = _opened(identity)
    stamps = tuple((table, hash(run.stamp(table))) for table in Table)
    world = world_of(run)
    return RunSnapshot(identity, run.status, stamps, sampled_rank(run, world) if rank is None else rank, world)


@st.cache_resource(max_entries=_OPEN, show_spinner=False)
def _opened(identity: RunIdentity) -> Run:
    return open_run(identity.path)
