"""Keeps results of analysis over all runs and sessions, until what they are made of changes.

A cached function takes the `RunSnapshot` first. Its other arguments are a part of the key as they are written in the
call, so they have no defaults: left out and given, they would be two results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ParamSpec, TypeVar

import streamlit as st

from ampscope.trace.schema import Table
from data.run_snapshot import RunIdentity, RunSnapshot

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
