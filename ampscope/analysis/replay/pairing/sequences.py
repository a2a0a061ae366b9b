"""Two sequences of numbers lined up: which element of one is which of the other, in order, in about linear time."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import numpy as np

from ampscope.analysis.numerics.arrays import IntArray

#: Widths of the neighbourhoods that are looked for where no element is found once in each sequence.
_WIDTHS = (1, 4, 16)
#: Cells of the table by which what lies between two anchors is lined up exactly.
_CELLS = 1 << 16
_MULTIPLIER = 0x9E3779B97F4A7C15


def align(one: IntArray, other: IntArray) -> IntArray:
    """Of each element of ``one`` the index of its counterpart in ``other``, -1 where it has none; ascending.

    What both begin and end with is taken as it is. In between, elements (or neighbourhoods of elements) that occur once
    in each are anchors, as in a patience diff; between two anchors the same again, and an exact longest common
    subsequence where that is small.
    """
    found = np.full(len(one), -1, np.int64)
    waiting = [(0, len(one), 0, len(other))]
    while waiting:
        start, stop, begin, end = _trimmed(one, other, waiting.pop(), found)
        if start == stop or begin == end:
            continue
        mine, theirs = one[start:stop], other[begin:end]
        if len(mine) * len(theirs) <= _CELLS:
            pairs = common_subsequence(mine.tolist(), theirs.tolist())
        else:
            pairs = _anchors(mine, theirs)
            marks = [(-1, -1), *pairs, (len(mine), len(theirs))]
            between = [(a + 1, c, b + 1, d) for (a, b), (c, d) in pairwise(marks)] if pairs else []
            waiting += [(start + a, start + c, begin + b, begin + d) for a, c, b, d in between]
        for mine_at, theirs_at in pairs:
            found[start + mine_at] = begin + theirs_at
    return found


def common_subsequence(one: list[int], other: list[int]) -> list[tuple[int, int]]:
    """The longest common subsequence as pairs of indices."""
    rows = [[0] * (len(other) + 1)]
    for value in reversed(one):
        below, row, best = rows[-1], [0] * (len(other) + 1), 0
        for at in range(len(other) - 1, -1, -1):
            best = below[at + 1] + 1 if value == other[at] else max(below[at], best)
            row[at] = best
        rows.append(row)
    rows.reverse()
    pairs, at, there = [], 0, 0
    while at < len(one) and there < len(other):
        if one[at] == other[there]:
            pairs.append((at, there))
            at, there = at + 1, there + 1
        elif rows[at + 1][there] >= rows[at][there + 1]:
            at += 1
        else:
            there += 1
    return pairs


def ascending(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest run of pairs, which ascend in the first index, that ascends in the second, too."""
    ends: list[int] = []
    places: list[int] = []
    before: list[int] = []
    for number, (_, there) in enumerate(pairs):
        at = bisect_left(ends, there)
        before.append(places[at - 1] if at else -1)
        ends[at : at + 1] = [there]
        places[at : at + 1] = [number]
    kept, number = [], places[-1] if places else -1
    while number >= 0:
        kept.append(pairs[number])
        number = before[number]
    return kept[::-1]


def _trimmed(
    one: IntArray, other: IntArray, window: tuple[int, int, int, int], found: IntArray
) -> tuple[int, int, int, int]:
    """The window without what it begins and ends with in both, which goes into ``found``."""
    start, stop, begin, end = window
    size = min(stop - start, end - begin)
    head = _equal(one[start : start + size], other[begin : begin + size])
    found[start : start + head] = np.arange(begin, begin + head)
    start, begin, size = start + head, begin + head, size - head
    tail = _equal(one[stop - size : stop][::-1], other[end - size : end][::-1])
    found[stop - tail : stop] = np.arange(end - tail, end)
    return start, stop - tail, begin, end - tail


def _equal(one: IntArray, other: IntArray) -> int:
    """How many elements are the same before the first that is not."""
    apart = np.flatnonzero(one != other)
    return int(apart[0]) if len(apart) else len(one)


def _anchors(one: IntArray, other: IntArray) -> list[tuple[int, int]]:
    """Pairs of places, ascending, of which all but chance says that they are the same."""
    for width in _WIDTHS:
        if min(len(one), len(other)) < width:
            break
        pairs = _once(_neighbourhoods(one, width), _neighbourhoods(other, width))
        if pairs:
            return ascending(pairs)
    return ascending(_by_occurrence(one, other))


def _neighbourhoods(values: IntArray, width: int) -> IntArray:
    """A number for each ``width`` elements in a row."""
    mixed = np.zeros(len(values) - width + 1, np.uint64)
    with np.errstate(over="ignore"):
        for shift in range(width):
            part = values[shift : shift + len(mixed)].astype(np.uint64) + np.uint64(1)
            mixed = (mixed ^ (mixed >> np.uint64(29)) ^ part) * np.uint64(_MULTIPLIER)
    return mixed.view(np.int64)


def _once(one: IntArray, other: IntArray) -> list[tuple[int, int]]:
    """Where values that occur once in each are, by place in ``one``."""
    (mine, here), (theirs, there) = _unique(one), _unique(other)
    _, first, second = np.intersect1d(mine, theirs, assume_unique=True, return_indices=True)
    return sorted(zip(here[first].tolist(), there[second].tolist(), strict=True))


def _unique(values: IntArray) -> tuple[IntArray, IntArray]:
    found, first, counts = np.unique(values, return_index=True, return_counts=True)
    return found[counts == 1], first[counts == 1]


def _by_occurrence(one: IntArray, other: IntArray) -> list[tuple[int, int]]:
    """Each value's first occurrence with the first, its second with the second."""
    return _once(_numbered(one), _numbered(other))


def _numbered(values: IntArray) -> IntArray:
    """Values made different by how often they occurred before."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    occurrence = np.empty(len(values), np.int64)
    occurrence[order] = np.arange(len(values)) - np.searchsorted(ordered, ordered)
    return values * (1 << 24) + occurrence
