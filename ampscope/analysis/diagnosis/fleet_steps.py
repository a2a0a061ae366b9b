"""Questions over the steps of a fleet's runs: what they sum up to, and what changed in a window of days."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ampscope.analysis.diagnosis.fleet_results import Collapse, Lost, RateChange, RunVerdict, Window
from ampscope.analysis.scale.scaler_course import CALIBRATION_STEPS, LOWEST_USEFUL_SCALE
from ampscope.analysis.tables.lazy_tables import collect_rows
from ampscope.trace.fleet_tables import FleetTables
from ampscope.trace.location import location
from ampscope.trace.manifest import Manifest
from ampscope.trace.schema import Table
from ampscope.trace.vocabulary import Verdict

#: Collapsed scales that are told one by one.
MOST_COLLAPSES = 100
_KEY = "run, rank, optimizer"
_LOST = f"skipped AND step >= {CALIBRATION_STEPS}"
_SUMS = (
    f"{_KEY}, count(*) AS steps, max(step) AS last, count_if(skipped) AS skipped, count_if({_LOST}) AS lost, "
    f"sum(duration_s) FILTER (WHERE {_LOST}) AS seconds, arg_max(scale, step) AS scale, max(scale) AS highest"
)


class StepSums(NamedTuple):
    """The attempts of one optimizer on one rank."""

    run: str
    rank: int
    optimizer: int
    steps: int
    last: int
    skipped: int
    lost: int  #: skipped ones that are none of the run's first attempts
    seconds: float | None  #: that the lost ones took
    scale: float | None  #: loss scale of the newest attempt that has one
    highest: float | None

    @property
    def has_collapsed(self) -> bool:
        """Whether its loss scale ended below 1."""
        return self.scale is not None and self.scale < LOWEST_USEFUL_SCALE


def step_sums(tables: FleetTables) -> list[StepSums]:
    """The sums of all runs that can be read, by run, rank and optimizer."""
    return sorted(StepSums(*row) for row in collect_rows(tables.table(Table.STEPS), _SUMS, _KEY))


def lost_steps(sums: Iterable[StepSums], manifests: Mapping[Path, Manifest]) -> Lost:
    """Counts the skipped optimizer steps of a fleet, and what they cost.

    Where some ranks of a job did not record, those that did stand for them.

    Args:
        sums: The steps.
        manifests: Of each run, by its folder.
    """
    steps = skipped = lost = 0
    hours = {True: 0.0, False: 0.0}
    by_run: dict[str, list[StepSums]] = {}
    for each in sums:
        by_run.setdefault(each.run, []).append(each)
    for run, own in by_run.items():
        manifest = manifests[location(run)]
        seconds = sum(each.seconds or 0.0 for each in own)
        stands_for = max(1.0, manifest.world_size / len({each.rank for each in own}))
        hours[is_gpu(manifest.device)] += seconds * stands_for / 3600
        steps += sum(each.steps for each in own)
        skipped += sum(each.skipped for each in own)
        lost += sum(each.lost for each in own)
    return Lost(
        steps=steps,
        skipped=skipped,
        calibrating=skipped - lost,
        lost=lost,
        device_hours=hours[True] + hours[False],
        gpu_hours=hours[True],
    )


def is_gpu(device: str) -> bool:
    """Whether a manifest's device is a GPU: it has a product's name there, others their kind."""
    return device.lower() not in ("", "cpu", "mps", "xla", "meta")


def collapses(sums: Iterable[StepSums]) -> tuple[Collapse, ...]:
    """The loss scales that ended below 1, the lowest first."""
    found = [
        Collapse(
            run=each.run,
            rank=each.rank,
            optimizer=each.optimizer,
            step=each.last,
            scale=each.scale or 0.0,
            highest=each.highest or 0.0,
        )
        for each in sums
        if each.has_collapsed
    ]
    return tuple(sorted(found, key=lambda each: (each.scale, each.run, each.rank, each.optimizer)))


_DAY = 86_400.0


def window(
    manifests: Mapping[Path, Manifest],
    verdicts: Mapping[Path, RunVerdict],
    days: float,
    groups: Mapping[str, Callable[[Manifest], str]],
) -> Window | None:
    """Compares the newest days with as many before; None where no run says when it began.

    Args:
        manifests: Of each run.
        verdicts: Of those that were diagnosed.
        days: How many.
        groups: By its kind, what runs are told apart by.
    """
    begun = {run: each.created for run, each in manifests.items() if each.created > 0}
    if not begun:
        return None
    ends = max(begun.values())
    now = [run for run, time in begun.items() if time > ends - days * _DAY]
    before = [run for run, time in begun.items() if ends - 2 * days * _DAY < time <= ends - days * _DAY]
    hits = [_causes(runs, verdicts) for runs in (before, now)]
    found = [
        _change("cause", name, (len(before), hits[0][name]), (len(now), hits[1][name])) for name in {*hits[0], *hits[1]}
    ]
    for kind, name_of in groups.items():
        sides = [_problems(runs, manifests, verdicts, name_of) for runs in (before, now)]
        found += [_change(kind, name, *(side.get(name, (0, 0)) for side in sides)) for name in {*sides[0], *sides[1]}]
    told = [each for each in found if each.deviations]
    told.sort(key=lambda each: (-abs(each.deviations), each.kind, each.name))
    return Window(days=days, ends=ends, runs=len(now), runs_before=len(before), changes=tuple(told))


def _causes(runs: Iterable[Path], verdicts: Mapping[Path, RunVerdict]) -> Counter[str]:
    """In how many of the runs each cause was told."""
    told = (verdicts[run].told for run in runs if run in verdicts)
    return Counter(cause for each in told for cause in {one.cause.value for one in each})


def _problems(
    runs: Iterable[Path],
    manifests: Mapping[Path, Manifest],
    verdicts: Mapping[Path, RunVerdict],
    name_of: Callable[[Manifest], str],
) -> dict[str, tuple[int, int]]:
    """By name, how many runs there are and how many of them have a problem."""
    found: dict[str, tuple[int, int]] = {}
    for run in runs:
        count, bad = found.get(name := name_of(manifests[run]), (0, 0))
        has_problem = run in verdicts and verdicts[run].verdict == Verdict.PROBLEM
        found[name] = count + 1, bad + has_problem
    return found


def _change(kind: str, name: str, before: tuple[int, int], now: tuple[int, int]) -> RateChange:
    return RateChange(
        kind=kind,
        name=name,
        runs_before=before[0],
        hit_before=before[1],
        runs=now[0],
        hit=now[1],
        deviations=_deviations(before, now),
    )


def _deviations(before: tuple[int, int], now: tuple[int, int]) -> float:
    """The difference of two shares by its standard error, if both were one share: the pooled two-proportion z-test."""
    (was, hit_before), (runs, hit) = before, now
    if not was or not runs:
        return 0.0
    pooled = (hit_before + hit) / (was + runs)
    error = math.sqrt(pooled * (1 - pooled) * (1 / was + 1 / runs))
    return (hit / runs - hit_before / was) / error if error else 0.0
