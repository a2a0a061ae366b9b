"""Two recordings in lockstep: which op of one is which of the other, and where their values part, for the eye."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from ampscope.analysis.numerics.arrays import BoolArray, FloatArray, IntArray
from ampscope.analysis.replay.pairing.op_pairs import pair_ops
from ampscope.analysis.replay.recording import Recording

#: From this many doublings between their largest magnitudes on, two results are told apart by their size.
FAR_BITS = 1.0


class Difference(IntEnum):
    """How an op's result differs from its counterpart's, the least first."""

    NONE = 0  #: the same bounds to the last digit
    DIGITS = 1  #: other values of about the same size
    SIZE = 2  #: largest magnitudes `FAR_BITS` doublings or more apart
    KIND = 3  #: neither is finite, and the one's are other infinities, or NaN, than the other's
    FINITE = 4  #: one is finite, the other is not
    ALONE = 5  #: the other step has no such op


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lockstep:
    """One recording against another; arrays have an element for each op of the one."""

    partner: IntArray  #: position in the other recording; -1 where it has none
    difference: npt.NDArray[np.int8]  #: `Difference`
    first: int | None  #: position of the first op, casts apart, whose values differ at all
    notable: IntArray  #: positions where the difference is of `Difference.SIZE` or more and did not begin earlier
    largest: FloatArray  #: the counterpart's largest magnitude, an exponent of 2; NaN where not known
    nonfinite: BoolArray  #: something in the counterpart is not finite that nobody wanted so
    only_other: int  #: ops that the other alone has

    def of(self, position: int) -> Difference:
        """How the op at ``position`` differs."""
        return Difference(int(self.difference[position]))


def lockstep(one: Recording, other: Recording) -> Lockstep:
    """Where the ops of ``one`` differ from those of ``other`` that are the same."""
    partner = pair_ops(one, other).theirs
    difference = _differences(one, other, partner)
    told = ~one.cast & ~one.entry
    differing = np.flatnonzero((difference > Difference.NONE) & (difference < Difference.ALONE) & told)
    large = (difference >= Difference.SIZE) & told & ~((partner < 0) & one.sink)
    begins = large & ~np.append(False, large[:-1] & (difference[:-1] == difference[1:]))
    return Lockstep(
        partner=partner,
        difference=difference,
        first=int(differing[0]) if len(differing) else None,
        notable=np.flatnonzero(begins),
        largest=_of_counterparts(other.largest, partner, np.nan),
        nonfinite=_of_counterparts(other.alarming, partner, 0) > 0,
        only_other=len(other) - int((partner >= 0).sum()),
    )


def _of_counterparts(values: FloatArray | BoolArray, partner: IntArray, otherwise: float) -> FloatArray:
    found = np.full(len(partner), otherwise)
    found[partner >= 0] = values[partner[partner >= 0]]
    return found


def _differences(one: Recording, other: Recording, partner: IntArray) -> npt.NDArray[np.int8]:
    alone = partner < 0
    there = np.where(alone, 0, partner)
    found = np.zeros(len(one), np.int8)
    if len(other):
        found[_unequal(one, other, there)] = Difference.DIGITS
        with np.errstate(invalid="ignore"):
            found[np.abs(one.largest - other.largest[there]) >= FAR_BITS] = Difference.SIZE
        found[(found > Difference.NONE) & one.nonfinite & other.nonfinite[there]] = Difference.KIND
        told = _measured(one) & _measured(other)[there]
        found[(one.nonfinite != other.nonfinite[there]) & told] = Difference.FINITE
    found[alone] = Difference.ALONE
    return found


def _unequal(one: Recording, other: Recording, there: IntArray) -> BoolArray:
    """Where the bounds of the first outputs, both measured, are not the same; NaN is the same as NaN alone."""
    unequal = np.zeros(len(one), np.bool_)
    for name in ("min", "max"):
        (mine, known), (theirs, also_known) = _bound(one, name), _bound(other, name)
        theirs, also_known = theirs[there], also_known[there]
        unequal |= (mine != theirs) & ~(np.isnan(mine) & np.isnan(theirs)) & known & also_known
    return unequal


def _measured(seen: Recording) -> BoolArray:
    """Where it is known whether an op's results were finite."""
    return _bound(seen, "min")[1] | seen.nonfinite


def _bound(seen: Recording, name: str) -> tuple[FloatArray, BoolArray]:
    """A bound of each op's first output, and where it was measured."""
    first = seen.first_output[:-1]
    return seen.outputs.floats(name)[first], seen.outputs.known(name)[first]
