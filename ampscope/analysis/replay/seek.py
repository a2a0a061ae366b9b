"""Moves in a recording: to the next op of a kind, by a stride, from forward to backward and back."""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from ampscope.analysis.numerics.arrays import BoolArray, IntArray
from ampscope.analysis.replay.recording import Recording
from ampscope.trace.schema import SiteRow


class Kind(StrEnum):
    """What can be jumped to."""

    CAST = "cast"
    NEAR = "near"  #: within `ampscope.analysis.replay.recording.NEAR_BITS` of the dtype's limit
    NONFINITE = "nonfinite"  #: where NaN or infinity begins that is not intended: nothing that the op read was so
    MODULE = "module"  #: where another module begins


def marked(seen: Recording, kind: Kind) -> IntArray:
    """The positions of every op of ``kind``, ascending."""
    return np.flatnonzero(_flags(seen, kind))


def find(seen: Recording, words: str) -> IntArray:
    """The positions of the ops in whose name, module, dtype, file or line of code each of ``words`` occurs.

    Case does not count; no words find every op.
    """
    wanted = words.casefold().split()
    hits = [all(word in _text(site) for word in wanted) for site in seen.sites]
    return np.flatnonzero(np.array(hits, dtype=np.bool_)[seen.site])


def neighbourhood(places: IntArray, position: int, count: int) -> IntArray:
    """Of the ascending ``places`` those nearest to ``position`` by rank, ``count`` on either side where there are."""
    middle = int(np.searchsorted(places, position))
    start = max(min(middle - count, len(places) - 2 * count - 1), 0)
    return places[start : start + 2 * count + 1]


def following(places: IntArray, position: int) -> int | None:
    """The first of the ascending ``places`` after ``position``; None where there is none."""
    at = int(np.searchsorted(places, position, side="right"))
    return int(places[at]) if at < len(places) else None


def around(places: IntArray, position: int) -> int | None:
    """The next of the ascending ``places`` after ``position``, after the last the first; None where there is none."""
    found = following(places, position)
    return found if found is not None or not len(places) else int(places[0])


def advance(seen: Recording, position: int, stride: int) -> int:
    """``stride`` ops further, but not past an op where something not finite begins, nor past the last."""
    target = min(position + stride, max(len(seen) - 1, 0))
    stop = following(marked(seen, Kind.NONFINITE), position)
    return target if stop is None else min(target, stop)


def twins(seen: Recording, position: int) -> tuple[int, ...]:
    """The ops of backward that an op of forward led to, or the op of forward that one of backward belongs to.

    A program point that ran several times is matched in reverse within a micro-batch: backward undoes the last
    execution first.
    """
    site = seen.site_of(position)
    if site.forward_site is not None:
        found = _executions(seen, _index_of(seen, site.forward_site), position)
        mine = _executions(seen, int(seen.site[position]), position)
        return _mirrored(mine, found, position)
    pairs = [place for place, other in enumerate(seen.sites) if other.forward_site == site.site]
    found_by = (_executions(seen, place, position) for place in pairs)
    own = _executions(seen, int(seen.site[position]), position)
    return tuple(sorted(each for mine in found_by for each in _mirrored_back(own, mine, position)))


def _mirrored(mine: IntArray, forward: IntArray, position: int) -> tuple[int, ...]:
    """The execution in forward to which the backward op at ``position`` belongs."""
    if not len(forward):
        return ()
    per = max(len(mine) // len(forward), 1)
    place = len(forward) - 1 - int(np.searchsorted(mine, position)) // per
    return (int(forward[max(place, 0)]),)


def _mirrored_back(own: IntArray, backward: IntArray, position: int) -> tuple[int, ...]:
    return tuple(int(each) for each in backward if _mirrored(backward, own, int(each)) == (position,))


def _executions(seen: Recording, site: int | None, position: int) -> IntArray:
    """Where a site ran in the micro-batch of ``position``."""
    if site is None:
        return np.empty(0, np.int64)
    return np.flatnonzero((seen.site == site) & (seen.micro_batch == seen.micro_batch[position]))


def _text(site: SiteRow) -> str:
    told = (site.op, site.name, site.module, site.module_type, site.file, site.code, *site.out_dtypes)
    return "\n".join(told).casefold()


def _index_of(seen: Recording, number: int) -> int | None:
    return next((place for place, site in enumerate(seen.sites) if site.site == number), None)


def _flags(seen: Recording, kind: Kind) -> BoolArray:
    if kind is Kind.CAST:
        return seen.cast
    if kind is Kind.NEAR:
        return seen.near & ~seen.entry
    if kind is Kind.NONFINITE:
        return seen.born & ~seen.intended
    return _module_begins(seen)


def _module_begins(seen: Recording) -> BoolArray:
    """Where an op runs in another module than the one before it."""
    begins = np.ones(len(seen), np.bool_)
    begins[1:] = seen.module[1:] != seen.module[:-1]
    return begins
