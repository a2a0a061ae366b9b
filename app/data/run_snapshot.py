"""A run is kept as it is on the disk at one moment; results are kept until what they are made of changes.

A cached function takes the `RunSnapshot` first. Its other arguments are a part of the key as they are written in the
call, so they have no defaults: left out and given, they would be two results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ParamSpec, TypeVar

import streamlit as st

from ampscope.analysis.overview.bad_steps import World, sampled_rank, world_of
from ampscope.trace.location import location
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


P = ParamSpec("P")
R = TypeVar("R")
#: What a result depends on in a run: as long as it stays the same, so does the result.
DependsOn = Callable[[RunSnapshot], object]


def cached(
    depends_on: DependsOn, *, entries: int = 64, spinner: str | bool = False, of_rank: bool = True
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compute a result once for each run, state of what it ``depends_on``, and other arguments.

    Args:
        depends_on: `rows_of` some tables, `identity`, or a function of the snapshot.
        entries: How many results are kept; the oldest goes first.
        spinner: What is said while it is computed.
        of_rank: Whether it is another one for each rank of the run; else the rank must not be asked for.
    """

    def key(run: RunSnapshot) -> tuple[RunIdentity, int | None, object]:
        # Of a copy: a cached result that is asked for here would find its own run being hashed, and so in a cycle.
        return run.identity, run.rank if of_rank else None, depends_on(replace(run))

    return st.cache_resource(max_entries=entries, show_spinner=spinner, hash_funcs={RunSnapshot: key})


def rows_of(*tables: Table) -> DependsOn:
    """Computed again when one of ``tables`` has new rows."""
    return lambda run: run.stamps_of(tables)


def identity(run: RunSnapshot) -> RunIdentity:
    """Computed once: what is added to the run does not change it."""
    return run.identity


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
