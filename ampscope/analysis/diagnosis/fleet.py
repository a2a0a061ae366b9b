"""The diagnoses of many runs, several at a time; what is known of a run that has not changed is not asked again."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from ampscope.analysis.diagnosis.diagnosis import diagnose
from ampscope.analysis.diagnosis.fleet_results import (
    CauseCount,
    Fleet,
    GroupCount,
    PlaceCount,
    RunVerdict,
    ToldCause,
    UnreadableRun,
)
from ampscope.analysis.diagnosis.fleet_steps import MOST_COLLAPSES, StepSums, collapses, lost_steps, step_sums, window
from ampscope.analysis.results import Finding, Incident
from ampscope.analysis.tables.lazy_tables import collect_rows
from ampscope.errors import AmpscopeError, RunError
from ampscope.trace.fleet_tables import FleetTables
from ampscope.trace.location import location
from ampscope.trace.manifest import Manifest, read_manifest
from ampscope.trace.read.table_queries import Chosen
from ampscope.trace.schema import Table
from ampscope.trace.vocabulary import Cause, Severity, Verdict

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
    """Returns the verdict of the diagnosis of each run.

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
    """Returns the verdict of a run's diagnosis; that of a run that cannot be read says why."""
    try:
        found = diagnose(run)
    except AmpscopeError as error:
        return RunVerdict(verdict=UNREADABLE, problem=str(error))
    items: tuple[Incident | Finding, ...] = (*found.incidents, *found.findings)
    told = tuple(_told(each) for each in items if each.severity != Severity.INFO)
    primary = found.primary.cause if found.primary is not None else None
    return RunVerdict(verdict=found.verdict.value, primary=primary, told=told)


def _asked(runs: Sequence[Path]) -> Iterator[RunVerdict]:
    workers = min(os.cpu_count() or 1, len(runs))
    if len(runs) < _FEW or workers < 2:
        yield from map(verdict_of, runs)
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(verdict_of, runs, chunksize=4)


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


NOT_DIAGNOSED = "not_diagnosed"
#: What runs are told apart by.
GROUPS: dict[str, Callable[[Manifest], str]] = {
    "host": lambda manifest: manifest.host,
    "device": lambda manifest: manifest.device,
    "torch": lambda manifest: manifest.versions.get("torch", ""),
    "ampscope": lambda manifest: manifest.ampscope,
    "python": lambda manifest: manifest.versions.get("python", ""),
}
#: Threads that read manifests: they wait for the disk.
_READERS = 8


class Diagnosed(StrEnum):
    """Selects the runs that are diagnosed: each takes a good part of a second unless its verdict is known."""

    NONE = "none"
    RECORDED = "recorded"  #: those that recorded an incident or a finding
    ALL = "all"


def fleet(
    runs: Sequence[Path],
    *,
    days: float = 7.0,
    diagnosed: Diagnosed = Diagnosed.RECORDED,
    known: KnownVerdicts | None = None,
    engine: Chosen = "duckdb",
) -> Fleet:
    """Returns the results over all these runs together; a run that cannot be read is named, and left out.

    Args:
        runs: Their folders, as `ampscope.trace.read.find` finds them.
        days: The length of the window that is compared with the one before.
        diagnosed: Of which runs causes are told; of the others only what they recorded.
        known: Verdicts that need not be found out again.
        engine: What the tables of all runs are queried with, as for `ampscope.open_run`; diagnoses ask DuckDB.

    Raises:
        EngineError: the engine is unknown or cannot be had.
    """
    manifests, unreadable = _manifests(runs)
    with FleetTables([*manifests], engine) as tables:
        sums = step_sums(tables)
        recorded = _recorded(tables)
        unreadable |= tables.unreadable
    asked = {Diagnosed.NONE: [], Diagnosed.RECORDED: recorded, Diagnosed.ALL: [*manifests]}[diagnosed]
    found = verdicts(asked, known)
    unreadable |= {run: each.problem for run, each in found.items() if each.problem}
    begun = [each.created for each in manifests.values() if each.created > 0]
    fallen = collapses(sums)
    return Fleet(
        runs=len(runs),
        ranks=sum(each.world_size for each in manifests.values()),
        first=min(begun, default=None),
        last=max(begun, default=None),
        recorded=len(recorded),
        verdicts=_verdict_counts(found, len(runs)),
        causes=_causes(found.values()),
        places=_places(found.values()),
        groups=tuple(_groups(manifests, found, sums)),
        collapsed_runs=len({each.run for each in fallen}),
        collapses=fallen[:MOST_COLLAPSES],
        lost=lost_steps(sums, manifests),
        window=window(manifests, found, days, GROUPS),
        unreadable=tuple(UnreadableRun(path=str(run), why=why) for run, why in sorted(unreadable.items())),
    )


def _manifests(runs: Sequence[Path]) -> tuple[dict[Path, Manifest], dict[Path, str]]:
    """The manifests that can be read, and why the others cannot."""

    def read(run: Path) -> Manifest | str:
        try:
            return read_manifest(run)
        except RunError as error:
            return str(error)

    with ThreadPoolExecutor(_READERS) as pool:
        found = dict(zip(runs, pool.map(read, runs), strict=True))
    manifests = {run: each for run, each in found.items() if isinstance(each, Manifest)}
    return manifests, {run: each for run, each in found.items() if isinstance(each, str)}


def _recorded(tables: FleetTables) -> list[Path]:
    both = [tables.table(each) for each in (Table.INCIDENTS, Table.FINDINGS)]
    return sorted({location(run) for table in both for run, _ in collect_rows(table, "run, count(*) AS rows", "run")})


def _verdict_counts(found: Mapping[Path, RunVerdict], runs: int) -> dict[str, int]:
    counts = Counter(each.verdict for each in found.values())
    known = {each.value: counts.pop(each.value) for each in Verdict if counts[each.value]}
    left = {NOT_DIAGNOSED: runs - len(found)} if runs > len(found) else {}
    return {**known, **{name: count for name, count in counts.items() if count}, **left}


def _causes(found: Iterable[RunVerdict]) -> tuple[CauseCount, ...]:
    """Causes by the number of runs in which they were told."""
    runs: Counter[Cause] = Counter()
    first: Counter[Cause] = Counter()
    count: Counter[Cause] = Counter()
    severity: dict[Cause, Severity] = {}
    for each in found:
        runs.update({told.cause for told in each.told})
        if each.primary is not None:
            first[each.primary] += 1
        for told in each.told:
            count[told.cause] += told.count
            if severity.get(told.cause) != Severity.ERROR:
                severity[told.cause] = told.severity
    counted = [
        CauseCount(cause=cause, severity=severity[cause], runs=runs[cause], first=first[cause], count=count[cause])
        for cause in runs
    ]
    return tuple(sorted(counted, key=lambda each: (-each.runs, -each.count, each.cause)))


def _places(found: Iterable[RunVerdict]) -> tuple[PlaceCount, ...]:
    """Places by the number of runs in which something was told of them."""
    runs: Counter[tuple[Cause, str, str, str]] = Counter()
    count: Counter[tuple[Cause, str, str, str]] = Counter()
    for each in found:
        keyed = [((told.cause, told.op, told.module, told.line), told.count) for told in each.told]
        runs.update({key for key, _ in keyed})
        for key, number in keyed:
            count[key] += number
    counted = [
        PlaceCount(cause=key[0], op=key[1], module=key[2], line=key[3], runs=runs[key], count=count[key])
        for key in runs
        if any(key[1:])
    ]
    return tuple(sorted(counted, key=lambda each: (-each.runs, -each.count, each.cause, each.module, each.line)))


def _groups(
    manifests: Mapping[Path, Manifest], found: Mapping[Path, RunVerdict], sums: Sequence[StepSums]
) -> Iterable[GroupCount]:
    """Hosts, devices and versions, of each kind those with the most problems first."""
    steps: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    for each in sums:
        steps[each.run] += each.steps
        lost[each.run] += each.lost
    for kind, name_of in GROUPS.items():
        members: dict[str, list[Path]] = {}
        for run, manifest in manifests.items():
            members.setdefault(name_of(manifest), []).append(run)
        counted = [
            GroupCount(
                kind=kind,
                name=name,
                runs=len(own),
                problems=sum(run in found and found[run].verdict == Verdict.PROBLEM for run in own),
                steps=sum(steps[str(run)] for run in own),
                lost_steps=sum(lost[str(run)] for run in own),
            )
            for name, own in members.items()
        ]
        yield from sorted(counted, key=lambda each: (-each.problems, -each.lost_steps, -each.runs, each.name))
