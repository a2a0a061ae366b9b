"""Finds the nodes of a traced step whose ranges were recorded as places, and what was recorded of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from ampscope.analysis.origin.step_graph import Closeup
from ampscope.analysis.precision.ranges.place_detail import PlaceDetail
from ampscope.analysis.precision.ranges.places import Place
from ampscope.analysis.results import Incident, PathNode
from ampscope.trace.dtypes import PARTS
from ampscope.trace.schema import Node
from data.run_results import measured_of, place_keys_of, places_of
from data.run_snapshot import RunSnapshot

#: Recorded steps from which on there is a course.
_FEWEST = 2


def recorded_place_of(run: RunSnapshot) -> Callable[[PathNode], str | None]:
    """Gives the `Place.key` of what a node gave; None where no healthy step recorded it."""
    known = place_keys_of(run)

    def key_of(node: PathNode) -> str | None:
        place = Place(
            module=node.module,
            op=node.op,
            phase=node.phase,
            dtype=PARTS.get(node.dtype, node.dtype),
            name=node.name,
            source=node.source,
        )
        return place.key if place.key in known else None

    return key_of


def recorded_before(run: RunSnapshot, incident: Incident, closeup: Closeup) -> list[tuple[str, str, PlaceDetail]]:
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
    """The `Place.key` of each parameter's gradient, else of the parameter itself, by the parameter's name."""
    places = [each.place for each in measured_of(run).places]
    of_kind = (place for kind in (Node.PARAMETER, Node.GRADIENT) for place in places if place.op == kind)
    return {place.name: place.key for place in of_kind}
