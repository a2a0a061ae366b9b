"""Describes the result of a compaction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The files of a run's tables."""

    files: int
    bytes: int | None  #: null of what is only planned


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftAlone:
    """A part of the run that was not compacted, or not to the end."""

    path: str  #: a rank's folder, a table's, a file, or the run
    why: str  #: a sentence
    failed: bool  #: false where it is only not the time: a process writes there


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactedRun:
    """The compaction of one run."""

    run: str  #: its folder
    ranks: int
    before: Contents
    after: Contents  #: of a dry run what there would be; superseded files that are not removed yet are counted
    sealed: int  #: journals that a dead process had left and that are parts now
    merged: int  #: parts whose rows are in a larger one now
    waiting: int  #: superseded files that are not removed yet: a reader may still be about to open them
    left_alone: tuple[LeftAlone, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """A compaction of some runs."""

    dry_run: bool  #: whether it was only looked at
    runs: tuple[CompactedRun, ...]
