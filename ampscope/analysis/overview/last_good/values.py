"""What recorded steps tell: how inputs, parameters and the results of ops moved, with the loss scale taken out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ampscope.analysis.numerics.arrays import FloatArray
from ampscope.analysis.origin.step_graph import source_line
from ampscope.analysis.overview.last_good.good_steps import GoodSteps
from ampscope.analysis.overview.last_good.sampled import Point, Sampled
from ampscope.analysis.overview.last_good.unusual import UNUSUAL, Unusual, how_unusual, never_moved
from ampscope.analysis.overview.last_good.words import Compared, what
from ampscope.analysis.results import Move, MoveKind
from ampscope.analysis.words.number_words import number
from ampscope.trace.schema import ENTRY_NODES, Node, Phase

#: Bits, and the share of zeros, by which a value has moved at least.
LEAST_BITS, LEAST_SHARE = 1.0, 0.1
#: Shares that are no move.
_SHARE_FLOOR = 0.01
#: Inputs that are told.
_MOST_INPUTS = 3
_WHAT = "recorded steps"


class _Moved(NamedTuple):
    """A point that moved."""

    point: int
    before: float
    after: float
    unusual: Unusual


def moved_values(seen: Sampled, good: GoodSteps) -> Iterator[Move]:
    """The moves of magnitudes, and of the shares of zeros in inputs.

    Of what comes one after the other the first is told: what follows from a move is no more unusual than the move.
    """
    yield from _broken(seen, good)
    heights = _unscaled(seen, good)
    bits = heights[:, -1] - heights[:, -2]
    moved = np.flatnonzero(np.isfinite(bits) & (np.abs(bits) >= LEAST_BITS) & ~seen.bad[:, -1])
    found = [_judged(seen, heights, int(point), good) for point in moved]
    among = int(np.isfinite(bits).sum())
    found = [each if _is_input(seen, each) else each._replace(unusual=each.unusual.among(among)) for each in found]
    inputs = sorted((each for each in found if _is_input(seen, each)), key=lambda each: -_score(each))
    yield from (_told(seen, each, 0, good, MoveKind.BATCH) for each in inputs[:_MOST_INPUTS])
    yield from _zeros(seen, good)
    above = max(map(_score, inputs), default=0.0)
    for belongs in (_is_kept, _is_forward, _is_backward):
        family = sorted((each for each in found if belongs(seen.points[each.point])), key=lambda e: seen.first[e.point])
        if not family:
            continue
        lead = next((each for each in family if each.unusual.is_unusual), max(family, key=_score))
        move = _told(seen, lead, sum(map(_is_like(lead), family)) - 1, good, MoveKind.RANGE)
        if above >= UNUSUAL and move.score is not None:
            move = replace(move, score=min(move.score, above))
        above = max(above, move.score or 0.0)
        yield move


def compared(seen: Sampled, good: GoodSteps) -> Compared:
    """What `moved_values` could compare at all."""
    heights = _unscaled(seen, good)
    both = np.isfinite(heights[:, -2:]).all(axis=1) | (seen.high[:, -2:] == 0).any(axis=1)
    both &= np.isfinite(seen.high[:, -2:]).all(axis=1) & ~seen.bad[:, -1]
    return Compared(
        values=int(both.sum()),
        moved=bool((both & (seen.high[:, -1] != seen.high[:, -2])).any()),
        broken=bool(seen.broken.any()),
    )


def _broken(seen: Sampled, good: GoodSteps) -> Iterator[Move]:
    """What a step is given that is not finite any more; results of ops are what the incident itself is about."""
    places = [place for place in np.flatnonzero(seen.broken).tolist() if seen.points[place].op in ENTRY_NODES]
    places.sort(key=lambda place: seen.first[place])
    for chosen, kind in ((True, MoveKind.BATCH), (False, MoveKind.RANGE)):
        family = [place for place in places if (seen.points[place].op == Node.INPUT) is chosen]
        if not family:
            continue
        place, point = family[0], seen.points[family[0]]
        unusual = never_moved(int(np.isfinite(seen.high[place, :-1]).sum()))
        before, after = float(seen.high[place, -2]), np.nan if seen.nan[place, -1] else np.inf
        also = f", and {len(family) - 1:,} more like it" if len(family) > 1 else ""
        usual = f"finite in {unusual.seen} {_WHAT} before" if unusual.is_unusual else unusual.in_words(_WHAT)
        text = f"{what(point.op, point.name, point.module)} holds {'NaN' if seen.nan[place, -1] else 'infinities'}"
        text += f" ({number(before)} at step {int(seen.steps[-1]):,}){also}, {usual}"
        yield move_of(seen, place, good, unusual, kind=kind, text=text, before=before, after=after)


def _score(moved: _Moved) -> float:
    return -1.0 if moved.unusual.score is None else moved.unusual.score


def _is_like(lead: _Moved) -> Callable[[_Moved], bool]:
    return lambda each: each.unusual.is_unusual or not lead.unusual.is_unusual


def _is_input(seen: Sampled, moved: _Moved) -> bool:
    return seen.points[moved.point].op == Node.INPUT


def _is_kept(point: Point) -> bool:
    """What the training keeps from step to step."""
    return point.op in ENTRY_NODES and point.op != Node.INPUT


def _is_forward(point: Point) -> bool:
    return point.op not in frozenset(Node) and point.phase != Phase.BACKWARD


def _is_backward(point: Point) -> bool:
    return point.op == Node.GRADIENT or (point.phase == Phase.BACKWARD and point.op not in ENTRY_NODES)


def _unscaled(seen: Sampled, good: GoodSteps) -> FloatArray:
    """The logarithms of the magnitudes, without the loss scale that they carry; NaN for what is the scale itself."""
    with np.errstate(divide="ignore"):
        heights: FloatArray = np.log2(seen.high)
    heights[~np.isfinite(heights)] = np.nan
    scales = np.array([_scale_at(good, step) for step in (*seen.steps.tolist(), good.until)])
    if np.isnan(scales).all():
        return heights
    logs = np.log2(np.where(np.isfinite(scales) & (scales > 0), scales, 1.0))
    for place, point in enumerate(seen.points):
        if _is_backward(point):
            heights[place] -= logs
        elif point.op == Node.INPUT and (heights[place, -2:] == logs[-2:]).all() and logs[-1] != logs[-2]:
            heights[place] = np.nan
        elif point.phase == Phase.LOSS and _moves_less(heights[place] - logs, heights[place]):
            heights[place] -= logs
    return heights


def _moves_less(one: FloatArray, other: FloatArray) -> bool:
    return bool(abs(one[-1] - one[-2]) < abs(other[-1] - other[-2]))


def _scale_at(good: GoodSteps, step: int) -> float:
    place = int(np.searchsorted(good.history.step, step))
    known = place < good.history.step.size and good.history.step[place] == step
    return float(good.history.scale[place]) if known else np.nan


def _judged(seen: Sampled, heights: FloatArray, point: int, good: GoodSteps) -> _Moved:
    before = heights[point, :-1]
    known = np.isfinite(before)
    move = float(heights[point, -1] - heights[point, -2])
    unusual = how_unusual(seen.steps[known], before[known], move, good.until)
    with np.errstate(over="ignore"):  # without a loss scale that is next to nothing
        before_it, now = np.exp2(heights[point, -2:]).tolist()
    return _Moved(point, before_it, now, unusual)


def _told(seen: Sampled, moved: _Moved, others: int, good: GoodSteps, kind: MoveKind) -> Move:
    point, last = seen.points[moved.point], int(seen.steps[-1])
    backward = " in backward" if point.phase == Phase.BACKWARD and point.op != Node.GRADIENT else ""
    also = f", and {others:,} more like it" if others else ""
    verb = "reached" if moved.after >= moved.before else "fell to"
    scaled = " without the loss scale" if _is_backward(point) and not np.isnan(_scale_at(good, last)) else ""
    text = (
        f"{what(point.op, point.name, point.module)}{backward} {verb} {number(moved.after)}{scaled} "
        f"({number(moved.before)} at step {last:,}){also}, {moved.unusual.in_words(_WHAT)}"
    )
    told = {"kind": kind, "text": text, "before": moved.before, "after": moved.after}
    return move_of(seen, moved.point, good, moved.unusual, **told)


def _zeros(seen: Sampled, good: GoodSteps) -> Iterator[Move]:
    """The input in which the share of zeros moved most."""
    inputs = [place for place, point in enumerate(seen.points) if point.op == Node.INPUT]
    moves = {place: float(seen.zeros[place, -1] - seen.zeros[place, -2]) for place in inputs}
    moved = {place: move for place, move in moves.items() if abs(move) >= LEAST_SHARE}
    if not moved:
        return
    place = max(moved, key=lambda each: abs(moved[each]))
    shares = seen.zeros[place, :-1]
    known = np.isfinite(shares)
    unusual = how_unusual(seen.steps[known], shares[known], moved[place], good.until, floor=_SHARE_FLOOR)
    before, after = float(seen.zeros[place, -2]), float(seen.zeros[place, -1])
    named = what(Node.INPUT, seen.points[place].name, "")
    text = f"{after:.0%} of {named} are zeros ({before:.0%} at step {int(seen.steps[-1]):,})"
    text += f", {unusual.in_words(_WHAT)}"
    told = {"kind": MoveKind.BATCH, "text": text, "before": before, "after": after, "unit": "share"}
    yield move_of(seen, place, good, unusual, **told)


def move_of(seen: Sampled, place: int, good: GoodSteps, unusual: Unusual, **told: Any) -> Move:
    """The move of a point, with where it is."""
    point, sites = seen.points[place], seen.sites.get((place, seen.steps.size), ())
    return Move(
        score=unusual.score,
        seen=unusual.seen,
        step=good.until,
        module=point.module,
        op=point.op,
        name=point.name,
        source=source_line(sites[0]) if sites else None,
        **told,
    )
