"""Results of analysis on a whole run; each is declared once, with the tables that it is made of."""

from __future__ import annotations

import math

from ampscope.analysis.diagnosis.diagnosis import diagnose
from ampscope.analysis.origin.step_graph import Closeup, closeup
from ampscope.analysis.overview.last_good.last_good import last_good
from ampscope.analysis.overview.overview import Overview, overview
from ampscope.analysis.overview.ranks.ranks import Ranks, ranks_at_a_glance
from ampscope.analysis.overview.run_list import Pulse, pulse
from ampscope.analysis.overview.search import Hits, search
from ampscope.analysis.precision.over_steps import PrecisionOverSteps, precision_over_steps
from ampscope.analysis.precision.plan import Plan, plan
from ampscope.analysis.precision.precision import Precision, precision
from ampscope.analysis.precision.ranges.heat_map import HeatMap, View, heat_map
from ampscope.analysis.precision.ranges.measured import MeasuredRun, measured_places
from ampscope.analysis.precision.ranges.place_detail import PlaceDetail, place_detail, place_details
from ampscope.analysis.precision.ranges.ranges import Ranges, ranges_of
from ampscope.analysis.results import Diagnosis, Incident, LastGood
from ampscope.analysis.scale.answer import ScaleAnswer, scale_answer
from ampscope.analysis.scale.scale_history import ScaleHistory, SkippedStep, scale_history, skipped_steps
from ampscope.analysis.scale.what_if import ScaleRecord
from ampscope.trace.schema import Table
from data.cache import cached, rows_of
from data.named_items import named_items
from data.run_snapshot import RunSnapshot

#: What can change the verdict at once, as a first NaN can; the rest counts once the run has grown by a fifth.
_ALARMING = (Table.INCIDENTS, Table.REPLAYS, Table.FINDINGS)
_HISTORY = (Table.STEPS, Table.SCALER_EVENTS, Table.EVENTS)
_TRACED = (Table.OPS, Table.EDGES, Table.SITES)
_GROWTHS_PER_DOUBLING = 4


def _pulse_changes(run: RunSnapshot) -> object:
    return run.status, run.stamps_of((Table.STEPS, *_ALARMING))


@cached(_pulse_changes)
def pulse_of(run: RunSnapshot) -> Pulse:
    """Whether it is alive."""
    return pulse(run.run, rank=run.rank)


def _verdict_changes(run: RunSnapshot) -> object:
    return (alarms_of(run), grown(run)) if run.is_open else run.stamps


def alarms_of(run: RunSnapshot) -> object:
    """Changes whenever something goes wrong in a run being written; with many NaN, at every fifth more."""
    return run.stamps_of(_ALARMING), _fifths(pulse_of(run).nonfinite)


def grown(run: RunSnapshot) -> object:
    """Changes whenever a run being written has grown by a fifth, for what takes long and changes slowly."""
    return _fifths(pulse_of(run).steps) if run.is_open else run.stamps


def _fifths(number: int) -> int:
    return math.floor(_GROWTHS_PER_DOUBLING * math.log2(1 + number))


@cached(_verdict_changes, of_rank=False)
def diagnosis_of(run: RunSnapshot) -> Diagnosis:
    """The verdict; on a run being written up to a fifth of it older than the rest, but for new incidents."""
    return diagnose(run.run)


@cached(rows_of(*_TRACED), of_rank=False)
def closeup_of(run: RunSnapshot, item: str) -> Closeup:
    """Returns the surroundings of an incident or finding, by its name from `named_items`."""
    return closeup(run.run, named_items(diagnosis_of(run))[item])


@cached(rows_of(*_HISTORY, *_TRACED, Table.INCIDENTS), of_rank=False)
def last_good_of(run: RunSnapshot, item: str) -> LastGood | None:
    """The last good step before an incident, by its name from `named_items`; None where there is nothing to tell."""
    found = named_items(diagnosis_of(run))[item]
    return last_good(run.run, found) if isinstance(found, Incident) else None


@cached(rows_of(*_HISTORY))
def overview_of(run: RunSnapshot, optimizer: int | None) -> Overview:
    """The time line and the tiles."""
    return overview(run.run, optimizer=optimizer, rank=run.rank)


@cached(rows_of(*_HISTORY))
def scale_history_of(run: RunSnapshot, optimizer: int | None) -> ScaleHistory:
    """The scaler's history."""
    return scale_history(run.run, optimizer=optimizer, rank=run.rank)


@cached(rows_of(*_HISTORY, *_TRACED))
def scale_answer_of(run: RunSnapshot, optimizer: int | None) -> ScaleAnswer:
    """Whether the loss scale is right."""
    return scale_answer(run.run, optimizer=optimizer, rank=run.rank)


@cached(rows_of(*_HISTORY, Table.GRADS, Table.INCIDENTS))
def skipped_steps_of(run: RunSnapshot, optimizer: int | None) -> tuple[SkippedStep, ...]:
    """The skipped steps, the newest first."""
    return skipped_steps(run.run, optimizer=optimizer, rank=run.rank)


@cached(rows_of(Table.STEPS))
def scale_record_of(run: RunSnapshot, optimizer: int | None) -> ScaleRecord:
    """The loss scale of each step, to ask what would have been."""
    return ScaleRecord.of(run.run, optimizer=optimizer, rank=run.rank)


@cached(rows_of(*_TRACED))
def precision_of(run: RunSnapshot, step: int, source: str) -> Precision:
    """The precision of a traced step."""
    return precision(run.run, step=step, source=source, rank=run.rank)


@cached(grown, spinner="Looking through the traced steps")
def precision_over_steps_of(run: RunSnapshot, optimizer: int) -> PrecisionOverSteps:
    """Returns the dtypes that the ops of all traced steps ran in."""
    return precision_over_steps(run.run, rank=run.rank, optimizer=optimizer)


@cached(grown, spinner="Reading the histograms")
def plan_of(run: RunSnapshot) -> Plan:
    """Returns the plan of what each module would lose in a narrower format."""
    return plan(run.run, rank=run.rank)


@cached(_verdict_changes, of_rank=False, spinner="Looking at all ranks")
def ranks_of(run: RunSnapshot) -> Ranks:
    """All ranks together; as old as the verdict."""
    return ranks_at_a_glance(run.run)


@cached(_verdict_changes, entries=8, spinner="Reading how large the values became")
def measured_of(run: RunSnapshot) -> MeasuredRun:
    """How large the values of each place became; as old as the verdict."""
    return measured_places(run.run, rank=run.rank)


@cached(_verdict_changes, entries=8)
def place_keys_of(run: RunSnapshot) -> frozenset[str]:
    """The `Place.key` of each place of `measured_of`."""
    return frozenset(each.place.key for each in measured_of(run).places)


@cached(rows_of(Table.STEPS, Table.OPS, Table.SITES))
def search_of(run: RunSnapshot, text: str) -> tuple[Hits, ...]:
    """Returns the steps, modules, lines and ops of the run that have these words."""
    return search(run.run, text, rank=run.rank)


#: Places of a table.
_CLOSEST = 300


@cached(_verdict_changes, entries=8)
def closest_of(run: RunSnapshot) -> Ranges:
    """The places closest to overflow, the closest first."""
    return ranges_of(measured_of(run), closest=_CLOSEST)


@cached(_verdict_changes)
def heat_map_of(run: RunSnapshot, view: View) -> HeatMap:
    """Modules by sampled steps."""
    return heat_map(measured_of(run), view)


@cached(_verdict_changes)
def place_of(run: RunSnapshot, key: str, step: int | None) -> PlaceDetail | None:
    """A place close up."""
    return place_detail(run.run, measured_of(run), key, step=step)


@cached(_verdict_changes)
def places_of(run: RunSnapshot, keys: tuple[str, ...]) -> dict[str, PlaceDetail]:
    """Several places close up, by their keys, in one look at the run."""
    return place_details(run.run, measured_of(run), keys)
