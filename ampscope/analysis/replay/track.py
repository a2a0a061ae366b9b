"""A recording as wide as a screen: magnitudes by position in a column per pixel, no spike lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ampscope.analysis.numerics.arrays import BoolArray, FloatArray, IntArray
from ampscope.analysis.numerics.dtypes import ran_in
from ampscope.analysis.replay.recording import Recording
from ampscope.trace.schema import Phase

#: Columns of a track: one for each pixel and a half of a wide figure.
COLUMNS = 600
#: Stretches of modules up to which a folding says too little.
_FEW = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Neighbouring ops with something in common; positions, the last one within."""

    first: int
    last: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Track:
    """Columns of one or more neighbouring ops. Magnitudes and limits are exponents of 2, NaN where none is known."""

    ops: int
    first: IntArray  #: position of the first op of each column
    focus: IntArray  #: position of the op that a column is about: not finite before near, then least headroom
    smallest: FloatArray
    largest: FloatArray
    limit: FloatArray  #: the lowest of the column's ops
    floor: FloatArray  #: the highest
    dtype: tuple[str, ...]  #: of the op in focus
    nonfinite: BoolArray  #: but what is intended
    intended: BoolArray
    near: BoolArray
    cast: BoolArray
    phases: tuple[Stretch, ...]
    modules: tuple[Stretch, ...]  #: joined to ancestors until they can be told apart on a screen

    @property
    def extent(self) -> tuple[float, float] | None:
        """The smallest and the largest known magnitude; None where none is."""
        both = np.concatenate([self.smallest, self.largest])
        known = both[~np.isnan(both)]
        return (float(known.min()), float(known.max())) if len(known) else None


def track(seen: Recording, *, columns: int = COLUMNS, stretches: int = 60) -> Track:
    """The track of ``seen`` in at most so many columns, with about so many stretches of modules."""
    count = len(seen)
    width = max(-(-count // columns), 1)
    first = np.arange(0, count, width)
    focus = _focus(seen, width)
    dtypes = [ran_in(site) for site in seen.sites]
    return Track(
        ops=count,
        first=first,
        focus=focus,
        smallest=_reduced(np.fmin, seen.smallest, first),
        largest=_reduced(np.fmax, seen.largest, first),
        limit=_reduced(np.fmin, seen.limit, first),
        floor=_reduced(np.fmax, seen.floor, first),
        dtype=tuple(dtypes[number] for number in seen.site[focus].tolist()),
        nonfinite=_any(seen.alarming, first),
        intended=_any(seen.intended, first),
        near=_any(seen.near, first),
        cast=_any(seen.cast, first),
        phases=tuple(_phases(seen)),
        modules=_modules(seen, stretches),
    )


def in_columns(drawn: Track, values: FloatArray) -> FloatArray:
    """The largest of ``values``, one for each op, in each column; NaN where there is none."""
    return _reduced(np.fmax, values, drawn.first)


def columns_of(drawn: Track, positions: IntArray) -> IntArray:
    """The columns in which ``positions`` lie, each once."""
    return np.unique(np.searchsorted(drawn.first, positions, side="right") - 1)


def _focus(seen: Recording, width: int) -> IntArray:
    """For each column the op that someone would want to land on."""
    badness = np.where(np.isnan(seen.headroom), -np.inf, -seen.headroom)
    badness = np.where(seen.alarming, 1e6, badness) + np.where(seen.born & ~seen.intended, 1e6, 0.0)
    count = len(badness)
    if not count:
        return np.empty(0, np.int64)
    rows = -(-count // width)
    padded = np.full(rows * width, -np.inf)
    padded[:count] = badness
    worst: IntArray = padded.reshape(rows, width).argmax(axis=1)
    return np.arange(rows) * width + worst


def _reduced(ufunc: np.ufunc, values: FloatArray, first: IntArray) -> FloatArray:
    return np.asarray(ufunc.reduceat(values, first)) if len(values) else values


def _any(flags: BoolArray, first: IntArray) -> BoolArray:
    return np.asarray(np.logical_or.reduceat(flags, first)) if len(flags) else flags


def _phases(seen: Recording) -> Iterator[Stretch]:
    """Forward and backward by turns; what stands at the end of the step belongs to what ran before it."""
    names = np.array([_phase_word(site.phase) for site in seen.sites], dtype=object)
    words = names[seen.site] if len(seen) else np.empty(0, object)
    told = np.flatnonzero(words != "")
    for start, stop in _runs(words[told]):
        last = int(told[stop + 1]) - 1 if stop + 1 < len(told) else len(seen) - 1
        yield Stretch(first=int(told[start]), last=last, name=str(words[told[start]]))


def _phase_word(phase: str) -> str:
    if phase in (Phase.FORWARD, Phase.LOSS):
        return "forward"
    return "backward" if phase in (Phase.BACKWARD, Phase.RECOMPUTE) else phase


def _modules(seen: Recording, wanted: int) -> tuple[Stretch, ...]:
    """The deepest folding of module names into at most ``wanted`` stretches.

    Where that tells next to nothing apart, as when all blocks have one parent, the next finer one, up to four times as
    many; nothing where even the coarsest has more.
    """
    deepest = max((name.count(".") + 1 for name in seen.modules), default=1)
    found: tuple[Stretch, ...] = ()
    for depth in range(1, deepest + 1):
        finer = tuple(_folded(seen, depth))
        if len(finer) > (wanted if len(found) > _FEW else 4 * wanted):
            break
        found = finer
    return found


def _folded(seen: Recording, depth: int) -> Iterator[Stretch]:
    names = np.array([".".join(name.split(".")[:depth]) for name in seen.modules], dtype=object)
    words = names[seen.module] if len(seen) else np.empty(0, object)
    for start, stop in _runs(words):
        yield Stretch(first=start, last=stop, name=str(words[start]))


def _runs(words: npt.NDArray[np.object_]) -> Iterator[tuple[int, int]]:
    """First and last index of each run of equal words."""
    if not len(words):
        return
    starts = [0, *(np.flatnonzero(words[1:] != words[:-1]) + 1).tolist()]
    yield from zip(starts, [*(start - 1 for start in starts[1:]), len(words) - 1], strict=True)
