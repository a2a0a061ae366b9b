"""The losses around a spike: whether the training got over it, and what else may have raised them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ampscope.analysis.numerics.arrays import FloatArray
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
    def got_over(self) -> bool:
        """Whether the losses came back to what they had been."""
        if not self._is_known:
            return False
        stretches = np.lib.stride_tricks.sliding_window_view(self.settled, STRETCH)
        highest = self.recent.max()
        pieces = (stretches[begin : begin + _AT_ONCE] for begin in range(0, len(stretches), _AT_ONCE))
        return any(bool((np.median(each, axis=1) <= highest).any()) for each in pieces)

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
