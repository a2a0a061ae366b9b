"""Each module in each format: what it would lose there, and whether that is little enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ampscope.analysis.numerics.arrays import BoolArray, FloatArray
from ampscope.analysis.precision.plan.formats import MX, SCALED, Fate
from ampscope.analysis.precision.plan.members import Members
from ampscope.analysis.tables.exponent_rows import Measured, MeasuredRow
from ampscope.trace.schema import Cast, Node

#: A module fits a format if at most this share of its values is flushed to zero, which beside the others are tiny,
MOST_FLUSHED = 0.05
#: this share of its gradients' mass, or of what is past the largest number of a format with a scale for each tensor;
#: there it becomes that number. In an MX block that happens to the largest by design, and costs it an eighth at most;
MOST_LOST = 0.01
#: and at most this share is subnormal, with fewer bits.
MOST_SUBNORMAL = 0.1
#: From this exponent on, finite values beside an infinite one say that it was an overflow, and no mask.
_NEAR_TOP = 12
#: What a module has before anything is computed.
_WEIGHTS = frozenset({Node.PARAMETER, Node.BUFFER})


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatLoss:
    """What a format would do to a module; shares of all values, and of the mass of gradients; null where not measured.

    It has many attributes because it is all that any view shows of a module in a format, and the JSON of it.
    """

    overflow_share: float | None = None
    lost_share: float | None = None  #: flushed to zero
    subnormal_share: float | None = None  #: kept with fewer bits
    gradient_overflow_share: float | None = None
    gradient_lost_share: float | None = None
    gradient_subnormal_share: float | None = None
    lost_at_most: float | None = None  #: of an MX format, where `lost_share` is an estimate
    fits: bool | None = None  #: null where nothing of the module was measured and finite, or its weights alone
    why: str = ""  #: of one that does not fit, which share is too large
    decides: str = ""  #: the share nearest to what is too large, or farthest past it; empty where all are zero


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlan:
    """One module in each format."""

    module: str
    module_type: str
    tensors: int  #: measured, gradients not among them
    gradients: int  #: measured
    overflowed: bool  #: values of it overflowed in float16 as the run was
    formats: Mapping[str, FormatLoss]


@dataclass(frozen=True)
class InFormat:
    """Of each row that was measured, what becomes of it; zeros where all of it is zero."""

    counts: Fate
    masses: Fate


def module_plans(measured: Measured, of: Members, fates: Mapping[str, InFormat]) -> tuple[ModulePlan, ...]:
    """The plan of each module.

    Args:
        measured: The tensors.
        of: Which module holds which.
        fates: By format, what becomes of each tensor.
    """
    sums = _Sums(measured, of)
    overflowed = sums.values(_overflowed(measured)) > 0
    computed = sums.values(_computed(measured)) > 0
    tensors, gradients = (sums.counted(gradient=gradient) for gradient in (False, True))
    losses = {name: _losses(fate, sums, name) for name, fate in fates.items()}
    return tuple(
        ModulePlan(
            module=name,
            module_type=of.types[number],
            tensors=int(tensors[number]),
            gradients=int(gradients[number]),
            overflowed=bool(overflowed[number]),
            formats={
                each: _known(
                    _judged(shares[number], each, overflowed=bool(overflowed[number])), computed=bool(computed[number])
                )
                for each, shares in losses.items()
            },
        )
        for number, name in enumerate(of.modules)
    )


def _overflowed(measured: Measured) -> FloatArray:
    """Of each row, how many values overflowed in float16 as the run was."""

    def count(row: MeasuredRow) -> int:
        near = row.dtype == "float16" and row.largest >= 2.0**_NEAR_TOP
        return row.infinite if near and not row.nan and not row.is_gradient else 0

    return np.array([count(row) for row in measured.rows], np.float64)


def _computed(measured: Measured) -> FloatArray:
    """Of each row, whether it was computed from a batch: a weight was not, and a cast may be of one."""
    weights = [row.site.op in _WEIGHTS or row.site.cast != Cast.NONE for row in measured.rows]
    return np.array([not each for each in weights], np.float64)


class _Sums:
    """Sums of what is known of each row over the members of each module."""

    def __init__(self, measured: Measured, of: Members) -> None:
        self._of, self._count = of, len(of.modules)
        self.elements = self.values(np.array([row.numel for row in measured.rows], np.float64))
        masses = np.zeros(len(measured.rows))
        shown = [place for place, number in enumerate(measured.number) if number is not None]
        masses[shown] = measured.exponents.mass
        # a step's gradient may be scaled, another's not: each counts by its own mass, without the scale
        self._unscaled = np.array([1.0 / row.loss_scale for row in measured.rows], np.float64)
        self.mass = self.gradients(masses)

    def values(self, of_rows: FloatArray) -> FloatArray:
        """Over what is no gradient."""
        return self._over(of_rows, ~self._of.is_gradient)

    def gradients(self, of_rows: FloatArray) -> FloatArray:
        """Over gradients, without their loss scale."""
        return self._over(of_rows * self._unscaled, self._of.is_gradient)

    def counted(self, *, gradient: bool) -> FloatArray:
        """How many tensors were measured."""
        return self._over(np.ones(self._unscaled.size), self._of.is_gradient == gradient)

    def _over(self, of_rows: FloatArray, chosen: BoolArray) -> FloatArray:
        modules, tensors = self._of.module[chosen], self._of.tensor[chosen]
        return np.bincount(modules, of_rows[tensors], self._count).astype(np.float64, copy=False)


def _losses(fate: InFormat, sums: _Sums, name: str) -> list[FormatLoss]:
    """Of each module, the shares; not judged yet."""
    of_values = [sums.values(each) for each in (fate.counts.overflow, fate.counts.lost, fate.counts.subnormal)]
    of_mass = [sums.gradients(each) for each in (fate.masses.overflow, fate.masses.lost, fate.masses.subnormal)]
    most = sums.values(fate.counts.most_lost)
    found = []
    for number, (elements, mass) in enumerate(zip(sums.elements, sums.mass, strict=True)):
        overflow, lost, subnormal = (_share(each[number], elements) for each in of_values)
        gradient_overflow, gradient_lost, gradient_subnormal = (_share(each[number], mass) for each in of_mass)
        found.append(
            FormatLoss(
                overflow_share=overflow,
                lost_share=lost,
                subnormal_share=subnormal,
                gradient_overflow_share=gradient_overflow,
                gradient_lost_share=gradient_lost,
                gradient_subnormal_share=gradient_subnormal,
                lost_at_most=_share(most[number], elements) if name in MX else None,
            )
        )
    return found


def _share(part: float, whole: float) -> float | None:
    return min(1.0, float(part / whole)) if whole > 0 else None


def _judged(loss: FormatLoss, name: str, *, overflowed: bool) -> FormatLoss:
    """With whether the module fits the format, and why not."""
    if loss.overflow_share is None:
        return loss
    if overflowed and name == "float16":
        return replace(loss, fits=False, why="overflow_share", decides="overflow_share")
    past = 1.0 if name in MX else MOST_LOST if name in SCALED else 0.0
    limits = {
        "overflow_share": past,
        "gradient_overflow_share": past,
        "lost_share": MOST_FLUSHED,
        "gradient_lost_share": MOST_LOST,
        "subnormal_share": MOST_SUBNORMAL,
        "gradient_subnormal_share": MOST_SUBNORMAL,
    }
    shares = {field: getattr(loss, field) or 0.0 for field in limits}
    decides = max((field for field in limits if shares[field]), key=_nearness(shares, limits), default="")
    above = [field for field, most in limits.items() if shares[field] > most]
    why = max(above, key=_nearness(shares, limits), default="")
    return replace(loss, fits=not above, why=why, decides=why or decides)


def _known(loss: FormatLoss, *, computed: bool) -> FormatLoss:
    """Without what weights alone say of a module: that they do not fit a format, but never that the module does."""
    if computed or loss.fits is False:
        return loss
    return replace(
        loss, overflow_share=None, lost_share=None, subnormal_share=None, lost_at_most=None, fits=None, decides=""
    )


def _nearness(shares: Mapping[str, float], limits: Mapping[str, float]) -> Callable[[str], float]:
    """How many times what is allowed for a share is; where nothing is, of what is of others."""
    return lambda field: shares[field] / (limits[field] or MOST_LOST)
