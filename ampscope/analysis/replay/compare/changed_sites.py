"""What is another about one program point than about its counterpart."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from ampscope.analysis.numerics.dtypes import plain, ran_in
from ampscope.analysis.replay.compare.pair_of_steps import StepPair
from ampscope.analysis.replay.compare.results import Kind
from ampscope.trace.json_columns import details
from ampscope.trace.schema import Node, SiteRow

#: Arguments that follow from shapes and dtypes, and say nothing where these differ.
_OF_SHAPES = frozenset({"size", "sizes", "self_size", "input_sizes", "normalized_shape", "split_sizes", "repeats"})


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
        return Kind.SCALE if (change.was, change.now) == (f"{mine:g}", f"{theirs:g}") else Kind.SCALAR

    def of_value(self, here: int, there: int, *, drawn: bool) -> Kind:
        """Of what an op made; ``drawn`` are random numbers."""
        if drawn:
            return Kind.RANDOM
        one, other = self.pair.one, self.pair.other
        return Kind.NONFINITE if one.nonfinite[here] != other.nonfinite[there] else Kind.VALUE

    def _values(self, here: int, there: int) -> tuple[float, float]:
        """The only element of both, where each has no other."""
        mine, theirs = int(self.pair.one.first_output[here]), int(self.pair.other.first_output[there])
        return float(self._largest[0][mine]), float(self._largest[1][theirs])

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
    return "left out" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
