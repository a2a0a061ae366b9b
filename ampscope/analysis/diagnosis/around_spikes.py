"""The losses and gradient norms around a spike: whether they came back, and what else may have raised them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ampscope.analysis.arrays import FloatArray
from ampscope.analysis.tables.step_history import History

#: Steps before a spike that say what was usual, and those of them that say where the loss was.
BEFORE, RECENT = 64, 20
#: Steps soon after a spike, in which a run may end by it.
AFTER = 20
#: Steps after which the loss says whether the training got over it (moments of an optimizer carry a gradient on),
SETTLING = 5
#: if so many follow, of which this many in a row are looked at together.
LEAST_AFTER, STRETCH = 20, 10
#: Stretches that are looked at in one go: of ten million steps all at once would take gigabytes.
_AT_ONCE = 1 << 16
#: A loss stayed up if it is above all before the spike for good, and in the middle by this factor.
STAYED_UP = 2.0
#: Up to here, as a multiple of the largest loss before, the loss of the spike itself was usual.
USUAL_LOSS = 2.0
#: A gradient norm this many times the largest before is out of its band, as for capture, which takes spikes down.
FAR_OUT = 10.0
#: A learning rate that rose by more than this explains a jump,
STEADY_RATE = 1.2
#: if it did so within this many steps before.
JUST_BEFORE = 3
#: A loss this many times those that follow was that of one batch, not of what all batches are like from then on;
APART = 3.0
#: so was one of which those that follow are this many times as large.
BLOWN_UP = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCourse:
    """The steps around one that stands out, without those that were skipped or whose loss went with the disk budget."""

    step: int
    before: FloatArray
    at: float
    after: FloatArray
    rates: FloatArray  #: learning rates of the steps before and of the step itself
    norms: FloatArray  #: gradient norms of the steps before, as far as they are known;
    norms_after: FloatArray  #: and of all after it

    @staticmethod
    def of(history: History, step: int) -> LossCourse | None:
        """The course around ``step``; None where the step, or all before it, is not in the trace."""
        place = int(np.searchsorted(history.step, step))
        counts = ~(history.skipped | history.thinned)
        before = np.flatnonzero(counts[:place])[-BEFORE:]
        if place >= history.step.size or history.step[place] != step or not before.size:
            return None
        after = place + 1 + np.flatnonzero(counts[place + 1 :])
        return LossCourse(
            step=step,
            before=history.loss[before],
            at=float(history.loss[place]),
            after=history.loss[after],
            rates=history.lr[np.append(before, place)],
            norms=_known(history.grad_norm[before]),
            norms_after=_known(history.grad_norm[after]),
        )

    @property
    def recent(self) -> FloatArray:
        """The losses just before the step."""
        return self.before[-RECENT:]

    @property
    def settled(self) -> FloatArray:
        """All losses from some steps after it."""
        return self.after[SETTLING:]

    @property
    def stayed_up(self) -> bool:
        """Whether no loss since, but for the first few, was as low as any before; of signed losses none can be told."""
        rose = self._is_known and self.settled.min() > self.recent.max()
        return bool(rose and np.median(self.settled) > STAYED_UP * np.median(self.recent))

    @property
    def loss_back(self) -> float | None:
        """The loss as it came back to what it had been; None where it did not, or is not known."""
        return _came_back(self.settled, self.recent.max(), math.inf) if self._is_known else None

    @property
    def norm_back(self) -> float | None:
        """The gradient norm as it came back to what it had been; None where it did not, or is not known."""
        highest = self.norms.max(initial=0.0)
        return _came_back(self.norms_after, highest, FAR_OUT * highest)

    @property
    def norms_out(self) -> FloatArray:
        """The gradient norms since that are out of their band, if up to the end no stretch is without one."""
        far = FAR_OUT * self.norms.max(initial=0.0)
        out: FloatArray = self.norms_after[self.norms_after > far]
        is_known = self.norms.size and self.norms_after.size >= SETTLING + LEAST_AFTER
        return out if is_known and _came_back(self.norms_after, math.inf, far) is None else out[:0]

    def accounts_for(self, norm: float, batch: float) -> bool:
        """Whether what is known to be well, or meant, goes with a gradient norm that has stayed out of its band.

        That is a learning rate that was raised, a loss that rose with it (it is weighted otherwise, or of other data),
        a batch of another size, or a loss that goes on falling. Of losses with a sign none can be told.

        Args:
            norm: The norm since.
            batch: By which factor the batch grew or shrank.
        """
        if self.rate_rose or not self._is_known:
            return True
        rose = max(1.0, self.at / self.recent.max())
        half = min(RECENT, self.settled.size // 2)
        late = np.median(self.settled[-half:])
        fell = late < np.quantile(self.settled[:half], 0.25) and late < rose * np.quantile(self.recent, 0.25)
        return bool(fell or norm <= FAR_OUT * self.norms.max() * max(rose, batch))

    @property
    def is_cut_short(self) -> bool:
        """Whether the run ended before its losses could tell whether the training got over it."""
        return self.settled.size < LEAST_AFTER

    @property
    def _is_known(self) -> bool:
        both = np.concatenate([self.recent, self.settled])
        return bool(not self.is_cut_short and (both > 0).all() and np.isfinite(both).all())

    def ended_at(self, bad_steps: Iterable[int]) -> int | None:
        """The first of ``bad_steps`` that came soon after the step, with no loss in between as it had been; else None.

        Args:
            bad_steps: Steps that were not finite, in order.
        """
        first = next((bad for bad in bad_steps if bad > self.step), None)
        if first is None or first > self.step + AFTER:
            return None
        between = self.after[: first - self.step - 1]
        above = np.isfinite(self.recent).all() and bool((between[np.isfinite(between)] > self.recent.max()).all())
        return first if above else None

    @property
    def rate_rose(self) -> bool:
        """Whether the learning rate had just been raised."""
        rates = self.rates[np.isfinite(self.rates)]
        latest, earlier = rates[-JUST_BEFORE - 1 :], rates[: -JUST_BEFORE - 1]
        return bool(earlier.size and latest.max() > STEADY_RATE * earlier.max())

    @property
    def was_usual(self) -> bool:
        """Whether the step's own loss was nothing out of the ordinary: only what its gradients did was."""
        return bool(self.at <= USUAL_LOSS * self.before.max())

    @property
    def was_apart(self) -> bool:
        """Whether the step's own loss was far from those that follow, as that of a single bad batch is."""
        soon = self.after[:AFTER]
        return bool(soon.size and (self.at >= APART * soon.max() or BLOWN_UP * self.at <= np.median(soon)))


def _known(values: FloatArray) -> FloatArray:
    known: FloatArray = values[~np.isnan(values)]
    return known


def _came_back(values: FloatArray, highest: float, far: float) -> float | None:
    """The median of the first stretch that is no larger than ``highest``, and holds nothing above ``far``."""
    if values.size < STRETCH:
        return None
    stretches = np.lib.stride_tricks.sliding_window_view(values, STRETCH)
    for begin in range(0, len(stretches), _AT_ONCE):
        piece = stretches[begin : begin + _AT_ONCE]
        medians = np.median(piece, axis=1)
        back = np.flatnonzero((medians <= highest) & (piece.max(axis=1) <= far))
        if back.size:
            return float(medians[back[0]])
    return None
