"""Results of analysis on a whole run; each is declared once, with the tables that it is made of."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable

from ampscope.analysis.diagnosis.diagnosis import diagnose
from ampscope.analysis.overview.last_good_step import last_good
from ampscope.analysis.overview.overview import Overview, overview
from ampscope.analysis.overview.rank_lives import Ranks, ranks_at_a_glance
from ampscope.analysis.overview.run_list import Pulse, pulse
from ampscope.analysis.overview.search import Hits, search
from ampscope.analysis.precision.over_steps import PrecisionOverSteps, precision_over_steps
from ampscope.analysis.precision.plan import Plan, plan
from ampscope.analysis.precision.precision import Precision, precision
from ampscope.analysis.precision.ranges.heat_map import HeatMap, View, heat_map
from ampscope.analysis.precision.ranges.measured import MeasuredRun, measured_places
from ampscope.analysis.precision.ranges.place_detail import PlaceDetail, place_detail, place_details
from ampscope.analysis.precision.ranges.places import OpPlace
from ampscope.analysis.precision.ranges.ranges import Ranges, ranges_of
from ampscope.analysis.replay.reproducible import reproducible
from ampscope.analysis.results import Diagnosis, Finding, Incident, LastGood, PathNode
from ampscope.analysis.scale.answer import ScaleAnswer, scale_answer
from ampscope.analysis.scale.scale_history import ScaleHistory, SkippedStep, scale_history, skipped_steps
from ampscope.analysis.scale.scaler_course import ScaleCourse
from ampscope.analysis.scale.what_if import scale_record
from ampscope.analysis.step_graph import IncidentSurroundings, closeup
from ampscope.errors import AmpscopeError
from ampscope.report.html.report_page import most_urgent_first, page
from ampscope.report.repro import ReproScript, as_script
from ampscope.trace.dtypes import PARTS
from ampscope.trace.schema import Node, Table
from data.run_snapshot import RunSnapshot, cached, rows_of

Item = Incident | Finding


def named_items(diagnosis: Diagnosis) -> dict[str, Item]:
    """Everything noticed by name; what to read first comes first, harmless things last."""
    named: dict[str, Item] = {}
    for item in most_urgent_first(diagnosis):
        name = f"{item.step}-{item.cause.value}"
        named[name if name not in named else f"{name}-{len(named)}"] = item
    return named


def incident_at(diagnosis: Diagnosis, step: int, rank: int) -> tuple[str, Incident] | None:
    """The incident that a step of a rank belongs to, with its name; the worst first, one of its own before others'."""
    found = [
        (name, item)
        for name, item in named_items(diagnosis).items()
        if isinstance(item, Incident) and item.step <= step <= item.last_step and rank in _ranks(item)
    ]
    return min(found, key=lambda one: rank in one[1].received_by, default=None)


def _ranks(item: Incident) -> tuple[int, ...]:
    return (item.rank, *item.also_on, *item.received_by)


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
def closeup_of(run: RunSnapshot, item: str) -> IncidentSurroundings:
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
def scale_record_of(run: RunSnapshot, optimizer: int | None) -> ScaleCourse:
    """The loss scale of each step, to ask what would have been."""
    return scale_record(run.run, optimizer=optimizer, rank=run.rank)


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
    """The `OpPlace.key` of each place of `measured_of`."""
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


#: Scripts kept; each may hold as many bytes as a run keeps of one call.
_SCRIPTS = 2


def html_report(run: RunSnapshot) -> bytes:
    """The run as one HTML file."""
    return page(run.run, diagnosis_of(run)).encode()


def repro_script(run: RunSnapshot, incident: Incident) -> ReproScript | str:
    """The script that makes the call at an incident's origin again, or why there is none, in words."""
    try:
        return _script_of(run, diagnosis_of(run).incidents.index(incident) + 1)
    except AmpscopeError as error:
        return str(error)


@cached(rows_of(*Table), entries=_SCRIPTS, of_rank=False)
def _script_of(run: RunSnapshot, number: int) -> ReproScript:
    """The script for the incident with this ``number``, from 1."""
    diagnosis = diagnosis_of(run)
    found = reproducible(run.run, diagnosis, number)
    return as_script(diagnosis.run, found, found.saved.content())


#: Recorded steps from which on there is a course.
_FEWEST = 2


def recorded_place_of(run: RunSnapshot) -> Callable[[PathNode], str | None]:
    """Gives the `OpPlace.key` of what a node gave; None where no healthy step recorded it."""
    known = place_keys_of(run)

    def key_of(node: PathNode) -> str | None:
        place = OpPlace(
            module=node.module,
            op=node.op,
            phase=node.phase,
            dtype=PARTS.get(node.dtype, node.dtype),
            name=node.name,
            source=node.source,
        )
        return place.key if place.key in known else None

    return key_of


def recorded_before(
    run: RunSnapshot, incident: Incident, closeup: IncidentSurroundings
) -> list[tuple[str, str, PlaceDetail]]:
    """Returns the result and the operands of an incident's op that have a recorded course up to it.

    Args:
        run: The run, seen from the incident's rank.
        incident: It.
        closeup: Who gave its op the operands.

    Returns:
        The key of each place, a name for it, and what was recorded.
    """
    if not incident.path:
        return []
    nodes: list[tuple[str, PathNode]] = [("what the op gave", incident.path[0])]
    nodes += [(f"operand {each.arg}", each.node) for each in closeup.operands]
    key_of = recorded_place_of(run)
    keys = [(name, key) for name, node in nodes if (key := key_of(node)) is not None]
    known = places_of(run, tuple(dict.fromkeys(key for _, key in keys)))
    found = [(key, name, known[key]) for name, key in keys if key in known]
    return [each for each in found if bisect_right(each[2].course.steps, incident.step) >= _FEWEST]


def recorded_parameters_of(run: RunSnapshot) -> dict[str, str]:
    """The `OpPlace.key` of each parameter's gradient, else of the parameter itself, by the parameter's name."""
    places = [each.place for each in measured_of(run).places]
    of_kind = (place for kind in (Node.PARAMETER, Node.GRADIENT) for place in places if place.op == kind)
    return {place.name: place.key for place in of_kind}
