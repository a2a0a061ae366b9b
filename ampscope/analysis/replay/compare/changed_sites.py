"""What is another about one program point than about its counterpart."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from ampscope.analysis.numerics.dtypes import plain, ran_in
from ampscope.analysis.replay.compare.pair_of_steps import StepPair
from ampscope.analysis.replay.compare.results import Kind
from ampscope.analysis.words.number_words import number
from ampscope.trace.json_columns import details
from ampscope.trace.schema import Cast, Node, SiteRow

#: Arguments that follow from shapes and dtypes, and say nothing where these differ.
_OF_SHAPES = frozenset({"size", "sizes", "self_size", "input_sizes", "normalized_shape", "split_sizes", "repeats"})


_MULTIPLYING = frozenset({"mul", "mul_"})


class Change(NamedTuple):
    """One thing that is another: ``name`` is ``was`` in the first and ``now`` in the second."""

    kind: Kind
    name: str
    was: str
    now: str


def site_changes(one: SiteRow, other: SiteRow) -> tuple[Change, ...]:
    """What is another, but for names of modules and the number of the line."""
    found = [*_scalars(one, other), *_dtype(one, other)]
    if not _same_shapes(one, other):
        found.append(Change(Kind.SHAPE, "shape", _shapes(one), _shapes(other)))
    if one.code and other.code and one.code != other.code:
        found.append(Change(Kind.LINE, "line", one.code, other.code))
    return tuple(found)


class Kinds:
    """What kind a difference is of.

    Args:
        pair: The steps.
        scales: Their loss scales.
    """

    def __init__(self, pair: StepPair, scales: tuple[float | None, float | None]) -> None:
        self.pair, self.scales = pair, scales
        self._of_scaler: tuple[set[int], set[int]] = set(), set()  #: positions in both of a scale that one alone has

    def alone(self, here: int, there: int) -> Kind:
        """Of an op that only one has, asked in order of execution."""
        side, at = (0, here) if here >= 0 else (1, there)
        seen = (self.pair.one, self.pair.other)[side]
        if self._scales(side, at):
            return Kind.SCALE
        return Kind.CAST if seen.site_of(at).cast != Cast.NONE else Kind.OP

    def _scales(self, side: int, at: int) -> bool:
        """Whether an op is a scaler's, and the other step has none: the scale, a copy of it, what it multiplies."""
        scale, other = self.scales[side], self.scales[1 - side]
        if scale is None or other is not None:
            return False
        known, writers = self._of_scaler[side], (self.pair.writers, self.pair.other_writers)[side][at]
        seen = (self.pair.one, self.pair.other)[side]
        if self._is_scale(side, at) if not writers else known.issuperset(writers):
            known.add(at)
            return True
        if not writers:  # its count of steps, which nothing in the step reads
            return bool(known) and bool(seen.first_reader[at] == seen.first_reader[at + 1])
        name = seen.site_of(at).op.partition(".")[2].partition(".")[0]
        return name in _MULTIPLYING and not known.isdisjoint(writers)

    def _is_scale(self, side: int, at: int) -> bool:
        """Whether what nothing wrote is a number as large as the scale, and nothing that the model holds."""
        seen, row = (self.pair.one, self.pair.other)[side], self._first(side, at)
        held = seen.entry[at] and seen.site_of(at).op != Node.INPUT
        one_element = int(seen.outputs.arrays["numel"][row]) == 1
        return not held and one_element and self._largest[side][row] == self.scales[side]

    def _first(self, side: int, at: int) -> int:
        return int((self.pair.one, self.pair.other)[side].first_output[at])

    def given(self, here: int, there: int) -> Kind:
        """Of what came into the step."""
        site = self.pair.one.site_of(here)
        if site.op != Node.INPUT:
            return Kind.WEIGHTS
        scales = self.scales
        return Kind.SCALE if scales[0] != scales[1] and self._values(here, there) == scales else Kind.BATCH

    def changed(self, change: Change) -> Kind:
        """What a changed argument is about: a scaler makes its first scale of one."""
        mine, theirs = self.scales
        if change.kind is not Kind.SCALAR or mine is None or theirs is None or mine == theirs:
            return change.kind
        return Kind.SCALE if (change.was, change.now) == (_word(mine), _word(theirs)) else Kind.SCALAR

    def of_value(self, here: int, there: int, *, drawn: bool) -> Kind:
        """Of what an op made; ``drawn`` are random numbers."""
        if drawn:
            return Kind.RANDOM
        one, other = self.pair.one, self.pair.other
        return Kind.NONFINITE if one.nonfinite[here] != other.nonfinite[there] else Kind.VALUE

    def _values(self, here: int, there: int) -> tuple[float, float]:
        """The only element of both, where each has no other."""
        return self._largest[0][self._first(0, here)], self._largest[1][self._first(1, there)]

    @cached_property
    def _largest(self) -> tuple[list[float], list[float]]:
        one, other = self.pair.one.outputs.floats("max"), self.pair.other.outputs.floats("max")
        return one.tolist(), other.tolist()


def _scalars(one: SiteRow, other: SiteRow) -> list[Change]:
    if one.scalars == other.scalars:
        return []
    mine, theirs = details(one.scalars), details(other.scalars)
    shaped = _same_shapes(one, other)
    apart = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    told = [name for name in apart if "dtype" not in name and (shaped or not _is_of_shapes(name, mine, theirs))]
    return [Change(Kind.SCALAR, name, _word(mine.get(name)), _word(theirs.get(name))) for name in told]


def _is_of_shapes(name: str, mine: dict[str, object], theirs: dict[str, object]) -> bool:
    return name in _OF_SHAPES or any(isinstance(each.get(name), list) for each in (mine, theirs))


def _dtype(one: SiteRow, other: SiteRow) -> list[Change]:
    was, now = (plain(dtypes[0]) if dtypes else "" for dtypes in (one.out_dtypes, other.out_dtypes))
    computed = ran_in(one), ran_in(other)
    if computed[0] != computed[1] and all(computed):
        was, now = computed
    return [Change(Kind.DTYPE, "dtype", was, now)] if was != now else []


def _same_shapes(one: SiteRow, other: SiteRow) -> bool:
    return tuple(one.in_shapes) == tuple(other.in_shapes) and tuple(one.out_shapes) == tuple(other.out_shapes)


def _shapes(site: SiteRow) -> str:
    return ", ".join(shape or "a scalar" for shape in (site.in_shapes or site.out_shapes))


def _word(value: object) -> str:
    return "left out" if value is None else number(value) if isinstance(value, float) else str(value)
