"""What recorded steps tell of dtypes and shapes: modules that compute in another dtype, inputs of another shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ampscope.analysis.overview.last_good.good_steps import GoodSteps
from ampscope.analysis.overview.last_good.sampled import Sampled
from ampscope.analysis.overview.last_good.unusual import never_moved
from ampscope.analysis.overview.last_good.values import move_of
from ampscope.analysis.overview.last_good.words import what
from ampscope.analysis.results import Move, MoveKind
from ampscope.trace.schema import Node, Phase

_CASTS = "_to_copy"
_FORWARD = frozenset({Phase.FORWARD, Phase.LOSS})


def moved_kinds(seen: Sampled, good: GoodSteps) -> Iterator[Move]:
    """The first point, in order of execution, whose dtype is another, and the first input whose shape is."""
    places = sorted(range(len(seen.points)), key=lambda place: seen.first[place])
    points = [(place, seen.points[place]) for place in places]
    computed = [place for place, point in points if point.phase in _FORWARD and _CASTS not in point.op]
    inputs = [place for place, point in points if point.op == Node.INPUT]
    yield from _first(seen, good, computed, MoveKind.DTYPE, "out_dtypes")
    yield from _first(seen, good, inputs, MoveKind.SHAPE, "out_shapes")


def _first(seen: Sampled, good: GoodSteps, places: Iterable[int], kind: MoveKind, of: str) -> Iterator[Move]:
    """The first of some points that never was so before, with how many more there are."""
    changed = [place for place in places if _has_changed(seen, place, of)]
    if not changed:
        return
    place, bad, last = changed[0], seen.steps.size, int(seen.steps[-1])
    before, after = (next(iter(seen.said(place, column, of))) for column in (bad - 1, bad))
    point = seen.points[place]
    unusual = never_moved(sum((place, column) in seen.sites for column in range(bad)))
    also = f", and {len(changed) - 1:,} more like it" if len(changed) > 1 else ""
    verb = "has the shape" if kind is MoveKind.SHAPE else "is in"
    text = (
        f"{what(point.op, point.name, point.module)} {verb} {after or 'scalar'} "
        f"({before or 'scalar'} at step {last:,}){also}, {unusual.in_words('recorded steps')}"
    )
    unit = "shape" if kind is MoveKind.SHAPE else "dtype"
    yield move_of(seen, place, good, unusual, kind=kind, text=text, before=before, after=after, unit=unit)


def _has_changed(seen: Sampled, place: int, of: str) -> bool:
    """Whether a point had one dtype or shape in all recorded good steps, and has another in the bad one."""
    bad = seen.steps.size
    was, now = seen.said(place, bad - 1, of), seen.said(place, bad, of)
    if was == now or len(was) != 1 or len(now) != 1:
        return False
    return all(seen.said(place, column, of) == was for column in range(bad) if (place, column) in seen.sites)
