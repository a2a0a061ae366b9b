"""The few figures of a run that people watch while it trains, added up from rows that were written anyway."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampscope.capture.record.signals.signals import Signals
from ampscope.trace.schema import StepRow


@dataclass(frozen=True, slots=True)
class LiveFigures:
    """Holds the figures known so far of this process's steps.

    Every value is on the host already: reading them waits for no device, so the latest steps of an accelerator may not
    be among them yet.
    """

    steps: int  #: attempts at a step, skipped ones too
    skipped_share: float | None  #: of the attempts through a scaler, the share that it skipped; None without a scaler
    scale: float | None  #: the latest loss scale; None without a scaler
    observing_share: float  #: AMPscope's own time, as a share of all steps' time
    grad_norm: float | None = None  #: L2 norm of the latest unscaled gradients, before clipping
    headroom_bits: float | None = None  #: factors of two up to overflow, of the value that came closest to it in the
    #: newest step that was traced, of those that have moved since the one before; None before two were

    def by_name(self) -> dict[str, float]:
        """The figures under the names that they have in logs; only those that this run has, and that are finite."""
        known = {
            "ampscope/loss_scale": self.scale,
            "ampscope/grad_norm": self.grad_norm,
            "ampscope/skipped_share": self.skipped_share,
            "ampscope/headroom_bits": self.headroom_bits,
            "ampscope/observing_share": self.observing_share,
        }
        return {name: value for name, value in known.items() if value is not None and math.isfinite(value)}


class FigureKeeper:
    """Adds up the rows of steps.

    Args:
        signals: Told of each step of the first optimizer; None where nobody is to be told.

    Attributes:
        headroom_bits: See `LiveFigures`.
    """

    def __init__(self, signals: Signals | None = None) -> None:
        self._signals = signals
        self._steps = 0
        self._scaled = 0  # steps through a scaler
        self._skipped = 0
        self._scale: float | None = None
        self._grad_norm: float | None = None
        self.headroom_bits: float | None = None
        self._seconds = 0.0
        self._observing = 0.0

    def step(self, row: StepRow) -> None:
        """The row of a step is written."""
        self._steps += 1
        self._seconds += row.duration_s
        self._observing += row.observing_s
        if row.found_inf is not None:
            self._scaled += 1
            self._skipped += row.skipped
        if row.scale is not None:
            self._scale = row.scale
        self._grad_norm = row.grad_norm
        if self._signals is not None and row.optimizer == 0:
            self._signals.step(row.step, self.now.by_name)

    @property
    def now(self) -> LiveFigures:
        """The figures so far."""
        return LiveFigures(
            self._steps,
            self._skipped / self._scaled if self._scaled else None,
            self._scale,
            self._observing / self._seconds if self._seconds else 0.0,
            self._grad_norm,
            self.headroom_bits,
        )
