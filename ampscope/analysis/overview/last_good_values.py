"""Steps that were recorded op by op tell how values moved, and which dtypes and shapes are others."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ampscope.analysis.arrays import Columns, FloatArray, IntArray
from ampscope.analysis.overview.last_good_curves import GoodSteps
from ampscope.analysis.overview.unusual_moves import UNUSUAL, Comparability, Unusual, how_unusual, never_moved, what
from ampscope.analysis.results import Move, MoveKind, SourceLine
from ampscope.analysis.tables.lazy_tables import collect_columns
from ampscope.analysis.tables.traced_steps import traced_rows
from ampscope.numerals import number
from ampscope.trace.files.parquet_part import ExecutionRows
from ampscope.trace.read.run import Run
from ampscope.trace.schema import ENTRY_NODES, SINK_NODES, Node, Phase, ReplayStatus, SiteRow, Source, Table, source_of

#: Recorded good steps that are compared with, the newest, and rows of ops that they have at most.
MOST_STEPS, MOST_ROWS = 8, 150_000
#: Recorded steps among which they are looked for.
_LOOKED = 64
_MEASURED = (
    'max(greatest(abs("min"), abs("max"))) FILTER (isfinite("min") AND isfinite("max")) AS high, '
    'count(*) FILTER (NOT (isfinite("min") AND isfinite("max"))) AS bad, '
    'count(*) FILTER (isnan("min") OR isnan("max")) AS nan, '
    "sum(zeros) AS zeros, sum(numel) FILTER (zeros IS NOT NULL) AS counted, min(seq) AS first"
)
_KEY = "site, out, step"
#: What a step leaves behind says nothing of what was given to it; of gradients it does.
_LEFT = SINK_NODES - {Node.GRADIENT}


class ProgramPoint(NamedTuple):
    """A point of the program, whatever dtypes and shapes it has."""

    op: str
    name: str
    module: str
    phase: str
    file: str
    line: int
    out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledValues:
    """Holds the measurements at each point, a column a step: the good ones, the newest last, then the bad one."""

    steps: IntArray  #: the good ones
    points: list[ProgramPoint]
    first: IntArray  #: when a point first ran in the bad step
    high: FloatArray  #: largest magnitudes; NaN where nothing finite was measured
    zeros: FloatArray  #: shares of zeros; NaN where they were not counted
    bad: npt.NDArray[np.bool_]  #: which had something that is not finite
    nan: npt.NDArray[np.bool_]  #: which had a NaN
    #: by point and column: the sites that ran
    sites: dict[tuple[int, int], list[SiteRow]] = field(default_factory=dict)

    def said(self, point: int, column: int, of: str) -> frozenset[str]:
        """The dtypes or shapes that a point's output had in a step.

        Args:
            point: Its number.
            column: The step's.
            of: ``out_dtypes`` or ``out_shapes``.
        """
        out = self.points[point].out
        given: Iterable[Sequence[str]] = (getattr(site, of) for site in self.sites.get((point, column), ()))
        return frozenset(each[out] for each in given if 0 <= out < len(each))

    @property
    def broken(self) -> npt.NDArray[np.bool_]:
        """A mask of the points with something non-finite in the bad step, and nothing such in any good one."""
        known = np.isfinite(self.high[:, -2])
        return known & self.bad[:, -1] & ~self.bad[:, :-1].any(axis=1)


def sampled(run: Run, rank: int, optimizer: int, good: GoodSteps) -> SampledValues | None:
    """Reads the steps to be compared; None where no good step, or not the bad one, was recorded op by op.

    Args:
        run: The run.
        rank: One of its ranks.
        optimizer: One of its optimizers.
        good: The steps before the bad one.
    """
    traced = traced_rows(run, rank)
    now = _of_bad(run, rank, optimizer, good.until, {each.source for each in traced if each.step == good.until})
    live = source_of(Source.LIVE, optimizer)
    steps = _newest((each for each in traced if each.source == live), good)
    if now is None or not steps:
        return None
    listed = ", ".join(map(str, steps))
    where = f"out >= 0 AND ((source = '{live}' AND step IN ({listed})) OR (source = '{now}' AND step = {good.until}))"
    ops = run.table(Table.OPS, step=(*steps, good.until), rank=rank)
    found = collect_columns(ops, f"{_KEY}, {_MEASURED}", _KEY, where=where)
    sites = {site.site: site for site in run.rows(Table.SITES, rank=rank)}
    return _arranged(found, [*steps, good.until], sites)


def _of_bad(run: Run, rank: int, optimizer: int, step: int, executed: Collection[str]) -> str | None:
    """The execution of the bad step that tells most of it: the replay, if it came out the same, or the step itself."""
    replays = [row.replay for row in run.rows(Table.INCIDENTS, rank=rank, step=step) if row.optimizer == optimizer]
    faithful = all(each == ReplayStatus.EXACT for each in replays)  # a spike has no row there
    sources = (Source.REPLAY, Source.LIVE) if faithful else (Source.LIVE,)
    return next((name for each in sources if (name := source_of(each, optimizer)) in executed), None)


def _newest(traced: Iterable[ExecutionRows], good: GoodSteps) -> list[int]:
    """The newest good ones of some steps, as many as there are rows to be read, in order."""
    kept: list[int] = []
    total = 0
    newest = heapq.nlargest(_LOOKED, ((each.step, each.rows) for each in traced if each.step <= good.calm))
    for step, count in newest:
        if good.is_good(step):
            total += count
            if kept and (total > MOST_ROWS or len(kept) == MOST_STEPS):
                break
            kept.append(step)
    return kept[::-1]


def _arranged(rows: Columns, steps: list[int], sites: dict[int, SiteRow]) -> SampledValues:
    """The rows of a query as one line for each point."""
    numbers: dict[ProgramPoint, int] = {}
    by_site: dict[tuple[int, int], int] = {}
    columns = np.searchsorted(steps, rows.ints("step"))
    of_row = np.full(len(rows), -1)
    ran: dict[tuple[int, int], list[SiteRow]] = {}
    for place, (site_number, out) in enumerate(zip(rows.ints("site").tolist(), rows.ints("out").tolist(), strict=True)):
        site = sites.get(site_number)
        if site is None or site.op in _LEFT or site.phase == Phase.OPTIMIZER:
            continue
        if (site_number, out) not in by_site:
            point = ProgramPoint(site.op, site.name, site.module, site.phase, site.file, site.line, out)
            by_site[site_number, out] = numbers.setdefault(point, len(numbers))
        of_row[place] = by_site[site_number, out]
        ran.setdefault((int(of_row[place]), int(columns[place])), []).append(site)
    kept = of_row >= 0
    at = of_row[kept], columns[kept]
    shape = len(numbers), len(steps)
    high, zeros, counted, bad, nan = (np.full(shape, np.nan), *(np.zeros(shape) for _ in range(4)))
    np.fmax.at(high, at, rows.floats("high")[kept])
    for name, into in (("zeros", zeros), ("counted", counted), ("bad", bad), ("nan", nan)):
        np.add.at(into, at, np.nan_to_num(rows.floats(name)[kept]))
    first = np.full(len(numbers), np.iinfo(np.int64).max)
    is_bad_step = kept & (columns == len(steps) - 1)
    np.minimum.at(first, of_row[is_bad_step], rows.ints("first")[is_bad_step])
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.where(counted > 0, zeros / counted, np.nan)
    return SampledValues(
        steps=np.array(steps[:-1], np.int64),
        points=list(numbers),
        first=first,
        high=high,
        zeros=shares,
        bad=bad > 0,
        nan=nan > 0,
        sites=ran,
    )


#: Bits, and the share of zeros, by which a value has moved at least.
LEAST_BITS, LEAST_SHARE = 1.0, 0.1
#: Shares that are no move.
_SHARE_FLOOR = 0.01
#: Inputs that are told.
_MOST_INPUTS = 3
_WHAT = "recorded steps"


class _Moved(NamedTuple):
    point: int
    before: float
    after: float
    unusual: Unusual


def moved_values(seen: SampledValues, good: GoodSteps) -> Iterator[Move]:
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


def compared(seen: SampledValues, good: GoodSteps) -> Comparability:
    """Lists all that `moved_values` could compare."""
    heights = _unscaled(seen, good)
    both = np.isfinite(heights[:, -2:]).all(axis=1) | (seen.high[:, -2:] == 0).any(axis=1)
    both &= np.isfinite(seen.high[:, -2:]).all(axis=1) & ~seen.bad[:, -1]
    return Comparability(
        values=int(both.sum()),
        moved=bool((both & (seen.high[:, -1] != seen.high[:, -2])).any()),
        broken=bool(seen.broken.any()),
    )


def _broken(seen: SampledValues, good: GoodSteps) -> Iterator[Move]:
    """Yields what a step is given and is not finite any more; bad results of ops are the incident itself."""
    places = [place for place in np.flatnonzero(seen.broken).tolist() if seen.points[place].op in ENTRY_NODES]
    places.sort(key=lambda place: seen.first[place])
    for chosen, kind in ((True, MoveKind.BATCH), (False, MoveKind.RANGE)):
        family = [place for place in places if (seen.points[place].op == Node.INPUT) is chosen]
        if not family:
            continue
        place, point = family[0], seen.points[family[0]]
        unusual = never_moved(int(np.isfinite(seen.high[place, :-1]).sum()))
        before, after = float(seen.high[place, -2]), np.nan if seen.nan[place, -1] else np.inf
        now = f"{what(point.op, point.name, point.module)} holds {'NaN' if seen.nan[place, -1] else 'infinities'}"
        usual = f"finite in {unusual.seen} {_WHAT} before" if unusual.is_unusual else unusual.in_words(_WHAT)
        text = _sentence(seen, now, number(before), usual, len(family) - 1)
        yield move_of(seen, place, good, unusual, kind=kind, text=text, before=before, after=after)


def _score(moved: _Moved) -> float:
    return -1.0 if moved.unusual.score is None else moved.unusual.score


def _is_like(lead: _Moved) -> Callable[[_Moved], bool]:
    return lambda each: each.unusual.is_unusual or not lead.unusual.is_unusual


def _is_input(seen: SampledValues, moved: _Moved) -> bool:
    return seen.points[moved.point].op == Node.INPUT


def _is_kept(point: ProgramPoint) -> bool:
    """Whether the training keeps a point's value from step to step."""
    return point.op in ENTRY_NODES and point.op != Node.INPUT


def _is_forward(point: ProgramPoint) -> bool:
    return point.op not in frozenset(Node) and point.phase != Phase.BACKWARD


def _is_backward(point: ProgramPoint) -> bool:
    return point.op == Node.GRADIENT or (point.phase == Phase.BACKWARD and point.op not in ENTRY_NODES)


def _unscaled(seen: SampledValues, good: GoodSteps) -> FloatArray:
    """The logarithms of the magnitudes, without the loss scale that they carry; NaN for what is the scale itself."""
    with np.errstate(divide="ignore"):
        heights: FloatArray = np.log2(seen.high)
    heights[~np.isfinite(heights)] = np.nan
    scales = np.array([good.history.scale_at(step) for step in (*seen.steps.tolist(), good.until)])
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


def _judged(seen: SampledValues, heights: FloatArray, point: int, good: GoodSteps) -> _Moved:
    before = heights[point, :-1]
    known = np.isfinite(before)
    move = float(heights[point, -1] - heights[point, -2])
    unusual = how_unusual(seen.steps[known], before[known], move, good.until)
    with np.errstate(over="ignore"):  # without a loss scale that is next to nothing
        before_it, now = np.exp2(heights[point, -2:]).tolist()
    return _Moved(point, before_it, now, unusual)


def _told(seen: SampledValues, moved: _Moved, others: int, good: GoodSteps, kind: MoveKind) -> Move:
    point, last = seen.points[moved.point], int(seen.steps[-1])
    backward = " in backward" if point.phase == Phase.BACKWARD and point.op != Node.GRADIENT else ""
    verb = "reached" if moved.after >= moved.before else "fell to"
    scaled = " without the loss scale" if _is_backward(point) and not np.isnan(good.history.scale_at(last)) else ""
    now = f"{what(point.op, point.name, point.module)}{backward} {verb} {number(moved.after)}{scaled}"
    text = _sentence(seen, now, number(moved.before), moved.unusual.in_words(_WHAT), others)
    told = {"kind": kind, "text": text, "before": moved.before, "after": moved.after}
    return move_of(seen, moved.point, good, moved.unusual, **told)


def _zeros(seen: SampledValues, good: GoodSteps) -> Iterator[Move]:
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
    now = f"{after:.0%} of {what(Node.INPUT, seen.points[place].name, '')} are zeros"
    text = _sentence(seen, now, f"{before:.0%}", unusual.in_words(_WHAT))
    told = {"kind": MoveKind.BATCH, "text": text, "before": before, "after": after, "unit": "share"}
    yield move_of(seen, place, good, unusual, **told)


def _sentence(seen: SampledValues, now: str, before: str, usual: str, others: int = 0) -> str:
    """States how a point is now, how it was in the last recorded good step, and how many more are like it."""
    also = f", and {others:,} more like it" if others else ""
    return f"{now} ({before} at step {int(seen.steps[-1]):,}){also}, {usual}"


def move_of(seen: SampledValues, place: int, good: GoodSteps, unusual: Unusual, **told: Any) -> Move:
    """The move of a point, with where it is."""
    point, sites = seen.points[place], seen.sites.get((place, seen.steps.size), ())
    return Move(
        score=unusual.score,
        seen=unusual.seen,
        step=good.until,
        module=point.module,
        op=point.op,
        name=point.name,
        source=SourceLine.of(sites[0]) if sites else None,
        **told,
    )


_CASTS = "_to_copy"
_FORWARD = frozenset({Phase.FORWARD, Phase.LOSS})


def moved_kinds(seen: SampledValues, good: GoodSteps) -> Iterator[Move]:
    """The first point, in order of execution, whose dtype is another, and the first input whose shape is."""
    places = sorted(range(len(seen.points)), key=lambda place: seen.first[place])
    points = [(place, seen.points[place]) for place in places]
    computed = [place for place, point in points if point.phase in _FORWARD and _CASTS not in point.op]
    inputs = [place for place, point in points if point.op == Node.INPUT]
    yield from _first(seen, good, computed, MoveKind.DTYPE, "out_dtypes")
    yield from _first(seen, good, inputs, MoveKind.SHAPE, "out_shapes")


def _first(seen: SampledValues, good: GoodSteps, places: Iterable[int], kind: MoveKind, of: str) -> Iterator[Move]:
    """The first of some points that never was so before, with how many more there are."""
    changed = [place for place in places if _has_changed(seen, place, of)]
    if not changed:
        return
    place, bad = changed[0], seen.steps.size
    before, after = (next(iter(seen.said(place, column, of))) for column in (bad - 1, bad))
    point = seen.points[place]
    unusual = never_moved(sum((place, column) in seen.sites for column in range(bad)))
    verb, unit = ("has the shape", "shape") if kind is MoveKind.SHAPE else ("is in", "dtype")
    now = f"{what(point.op, point.name, point.module)} {verb} {after or 'scalar'}"
    text = _sentence(seen, now, before or "scalar", unusual.in_words(_WHAT), len(changed) - 1)
    yield move_of(seen, place, good, unusual, kind=kind, text=text, before=before, after=after, unit=unit)


def _has_changed(seen: SampledValues, place: int, of: str) -> bool:
    """Whether a point had one dtype or shape in all recorded good steps, and has another in the bad one."""
    bad = seen.steps.size
    was, now = seen.said(place, bad - 1, of), seen.said(place, bad, of)
    if was == now or len(was) != 1 or len(now) != 1:
        return False
    return all(seen.said(place, column, of) == was for column in range(bad) if (place, column) in seen.sites)
