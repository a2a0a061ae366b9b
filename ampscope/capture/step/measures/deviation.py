"""Measures how far gradients and loss of a step in half precision are from those of the same step in float32."""

from __future__ import annotations

import math
from typing import NamedTuple

from ampscope.capture.replay.results import Regained
from ampscope.capture.torch_support.local_shards import local

#: Half precision rounds the gradient of a whole step by a percent or so; what is farther off by this share is wrong.
FAR = 0.1
#: A trial explains what it brings down to this share.
_LEFT = 0.25
#: It explains nothing where no more than this share of the gradients that are off are: single ones heal by chance.
_MOST = 0.5
#: Gradients of a smaller share of the whole gradient's norm are left out: some are nothing but rounding.
_SMALL = 1e-3


class Deviation(NamedTuple):
    """Distances from float32, each as a share of what float32 has."""

    total: float  #: of all gradients as one vector
    loss: float
    of: dict[str, float]  #: of single gradients, by parameter, that are not small beside all of them

    @staticmethod
    def between(ours: Regained, whole: Regained) -> Deviation:
        """Measures how far one run of a step is from another, in float32; waits for the device."""
        apart, sizes = {}, {}
        for name, gradient in whole.gradients.items():
            mine = ours.gradients.get(name)
            if mine is not None and mine.shape == gradient.shape:
                apart[name] = float((local(mine).float() - local(gradient).float()).norm())
                sizes[name] = float(local(gradient).float().norm())
        norm = math.hypot(*sizes.values())
        single = {name: gap / sizes[name] for name, gap in apart.items() if sizes[name] > _SMALL * norm}
        loss = _share(abs((ours.loss or 0.0) - (whole.loss or 0.0)), abs(whole.loss or 0.0))
        return Deviation(_share(math.hypot(*apart.values()), norm), loss, single)

    @property
    def is_large(self) -> bool:
        """Whether anything is farther off than half precision rounds."""
        return max(self.total, self.loss, *self.of.values(), 0.0) > FAR

    @property
    def is_near(self) -> bool:
        """Whether all gradients together, and the loss, are no farther off than that."""
        return max(self.total, self.loss) <= FAR

    def explained(self, left: Deviation) -> frozenset[str]:
        """The parameters whose gradients are off for what is to blame; none where most stay off without it.

        Args:
            left: How far they are off where float32 computes what is to blame, and nothing else.
        """
        off = {name for name, gap in self.of.items() if gap > FAR}
        healed = {name for name in off if left.of.get(name, math.inf) < _LEFT * self.of[name]}
        return frozenset(healed if len(healed) > _MOST * len(off) else ())

    def of_loss(self, left: Deviation) -> bool:
        """Whether the loss is off for it; see `explained`. One number may agree by chance: the gradients have to."""
        return self.loss > FAR and left.loss < _LEFT * self.loss and left.total <= FAR


def _share(gap: float, size: float) -> float:
    return gap / size if size > 0.0 else 0.0
