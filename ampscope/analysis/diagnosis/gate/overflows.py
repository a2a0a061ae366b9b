"""The places of a run that overflowed, and how far the others are from it, on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ampscope.analysis.precision.ranges.measured import measured_places
from ampscope.analysis.precision.ranges.ranges import RangeRow, range_row
from ampscope.trace.read.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Headrooms:
    """What was measured of a run; places whose values carry a loss scale are the scaler's own affair."""

    overflowed: tuple[RangeRow, ...]  #: places that gave infinities of finite numbers, and not on purpose
    closest: RangeRow | None  #: of all that can grow; null where nothing was measured
    measured: bool  #: whether the ops of any step were recorded


def headrooms(run: Run) -> Headrooms:
    """The places of all ranks.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    found = [measured_places(run, rank=rank) for rank in run.ranks]
    overflowed = [
        range_row(each, of.cells) for of in found for each in of.places if each.overflowed and each.scale is None
    ]
    near = [
        (rank, each) for rank, of in enumerate(found) for each in of.places if each.may_overflow and each.seen.largest
    ]
    closest = min(near, key=lambda pair: pair[1].place.format.max / (pair[1].seen.largest or 1.0), default=None)
    return Headrooms(
        overflowed=_once(overflowed),
        closest=range_row(closest[1], found[closest[0]].cells) if closest is not None else None,
        measured=any(of.places for of in found),
    )


def new_overflows(now: Iterable[RangeRow], before: Iterable[RangeRow]) -> Iterator[RangeRow]:
    """Those of ``now`` that ``before`` does not have.

    Lines of a program move from commit to commit, so a place is known by all but its line's number; where several lines
    are alike in that, as many are new as have been added, those with other code first.
    """
    known = list(before)
    codes = {(_name(row), _code(row)) for row in known}
    left = Counter(map(_name, known))
    for row in sorted(now, key=lambda row: (_name(row), _code(row)) not in codes):
        if left[_name(row)]:
            left[_name(row)] -= 1
        else:
            yield row


def _name(row: RangeRow) -> tuple[str, str, str, str, str, int]:
    return row.module, row.op, row.phase, row.dtype, row.name, row.optimizer


def _code(row: RangeRow) -> str:
    return row.source.code if row.source is not None else ""


def _once(rows: Iterable[RangeRow]) -> tuple[RangeRow, ...]:
    """A place that overflowed on several ranks is one."""
    return tuple({row.key: row for row in rows}.values())
