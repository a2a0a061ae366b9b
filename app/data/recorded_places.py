"""Which nodes of a traced step are places whose ranges were recorded."""

from __future__ import annotations

from collections.abc import Callable

from ampscope.analysis.precision.ranges.places import Place
from ampscope.analysis.results import PathNode
from ampscope.trace.dtypes import PARTS
from ampscope.trace.schema import Node
from data.run_results import measured_of, place_keys_of
from data.run_snapshot import RunSnapshot


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


def recorded_parameters_of(run: RunSnapshot) -> dict[str, str]:
    """The `Place.key` of each parameter's gradient, else of the parameter itself, by the parameter's name."""
    places = [each.place for each in measured_of(run).places]
    of_kind = (place for kind in (Node.PARAMETER, Node.GRADIENT) for place in places if place.op == kind)
    return {place.name: place.key for place in of_kind}
