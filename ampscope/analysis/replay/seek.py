"""Places in a recording: ops of a kind, those that a search finds, an op's other half."""

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


def marked(seen: Recording, kind: Kind) -> IntArray:
    """The positions of every op of ``kind``, ascending."""
    return np.flatnonzero(_flags(seen, kind))


def find(seen: Recording, words: str) -> IntArray:
    """The positions of the ops in whose name, module, dtype, file or line of code each of ``words`` occurs.

    Case does not count; no words find every op.
    """
    wanted = words.casefold().split()
    if not wanted:
        return np.arange(len(seen))
    hits = [all(word in _text(site) for word in wanted) for site in seen.sites]
    return np.flatnonzero(np.array(hits, dtype=np.bool_)[seen.site])


def neighbourhood(places: IntArray, position: int, count: int) -> IntArray:
    """Of the ascending ``places`` those nearest to ``position`` by rank, ``count`` on either side where there are."""
    middle = int(np.searchsorted(places, position))
    start = max(min(middle - count, len(places) - 2 * count - 1), 0)
    return places[start : start + 2 * count + 1]


def twins(seen: Recording, position: int) -> tuple[int, ...]:
    """The ops of backward that an op of forward led to, or the op of forward that one of backward belongs to."""
    forward = int(seen.forward[position])
    return (forward,) if forward >= 0 else tuple(np.flatnonzero(seen.forward == position).tolist())


def _text(site: SiteRow) -> str:
    told = (site.op, site.name, site.module, site.module_type, site.file, site.code, *site.out_dtypes)
    return "\n".join(told).casefold()


def _flags(seen: Recording, kind: Kind) -> BoolArray:
    if kind is Kind.CAST:
        return seen.cast
    if kind is Kind.NEAR:
        return seen.near & ~seen.entry
    return seen.born & ~seen.intended
