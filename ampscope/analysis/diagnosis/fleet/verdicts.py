"""The diagnoses of many runs, several at a time; what is known of a run that has not changed is not asked again."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Protocol

from ampscope.analysis.diagnosis.diagnosis import diagnose
from ampscope.analysis.diagnosis.fleet.results import RunVerdict, ToldCause
from ampscope.analysis.results import Diagnosis, Finding, Incident
from ampscope.errors import AmpscopeError
from ampscope.trace.vocabulary import Cause, Severity

UNREADABLE = "unreadable"
#: Runs from which on processes are started for them.
_FEW = 8


class KnownVerdicts(Protocol):
    """Remembers verdicts between two calls."""

    def get(self, run: Path) -> RunVerdict | None:
        """The verdict on a run as it is now; None where it is not known."""

    def keep(self, run: Path, verdict: RunVerdict) -> None:
        """Remember it."""


def verdicts(runs: Sequence[Path], known: KnownVerdicts | None = None) -> dict[Path, RunVerdict]:
    """What the diagnosis of each run says.

    Args:
        runs: Their folders.
        known: What was found out before; by default nothing.
    """
    found = {run: old for run in runs if known is not None and (old := known.get(run)) is not None}
    left = [run for run in runs if run not in found]
    for run, verdict in zip(left, _asked(left), strict=True):
        found[run] = verdict
        if known is not None and verdict.verdict != UNREADABLE:
            known.keep(run, verdict)
    return found


def verdict_of(run: Path) -> RunVerdict:
    """What the diagnosis of a run says; one that cannot be read says why."""
    try:
        found = diagnose(run)
    except AmpscopeError as error:
        return RunVerdict(verdict=UNREADABLE, problem=str(error))
    items: tuple[Incident | Finding, ...] = (*found.incidents, *found.findings)
    told = tuple(_told(each) for each in items if each.severity != Severity.INFO)
    return RunVerdict(verdict=found.verdict.value, primary=_primary(found), told=told)


def _asked(runs: Sequence[Path]) -> Iterable[RunVerdict]:
    workers = min(os.cpu_count() or 1, len(runs))
    if len(runs) < _FEW or workers < 2:
        return map(verdict_of, runs)
    return _in_processes(runs, workers)


def _in_processes(runs: Sequence[Path], workers: int) -> Iterator[RunVerdict]:
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(verdict_of, runs, chunksize=4)


def _primary(found: Diagnosis) -> Cause | None:
    return found.primary.cause if found.primary is not None else None


def _told(item: Incident | Finding) -> ToldCause:
    source = item.source
    return ToldCause(
        cause=item.cause,
        severity=item.severity,
        op=item.op if isinstance(item, Incident) else "",
        module=item.module if isinstance(item, Incident) else "",
        line=f"{source.file}:{source.line}" if source is not None else "",
        count=item.count,
    )
