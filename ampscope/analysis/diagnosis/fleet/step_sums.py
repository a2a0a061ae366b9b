"""The steps of all runs of a fleet, summed up by the query engine in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ampscope.analysis.diagnosis.fleet.results import Collapse, Lost
from ampscope.analysis.scale.skip_runs import CALIBRATION_STEPS, LOWEST_USEFUL_SCALE
from ampscope.analysis.tables.lazy_tables import collect_groups
from ampscope.trace.fleet.fleet_tables import FleetTables
from ampscope.trace.manifest import Manifest
from ampscope.trace.remote.location import location
from ampscope.trace.schema import Table

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
    return sorted(StepSums(*row) for row in collect_groups(tables.table(Table.STEPS), _SUMS, _KEY))


def lost_steps(sums: Iterable[StepSums], manifests: Mapping[Path, Manifest]) -> Lost:
    """What was skipped, and what that cost.

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
