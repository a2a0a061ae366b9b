"""The few figures of a run that people watch while it trains, added up from rows that were written anyway."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.trace.schema import StepRow


@dataclass(frozen=True, slots=True)
class LiveFigures:
    """What is known so far of the steps of this process.

    Every value is on the host already: reading them waits for no device, so the latest steps of an accelerator may not
    be among them yet.
    """

    steps: int  #: attempts at a step, skipped ones too
    skipped_share: float | None  #: of the attempts through a scaler, the share that it skipped; None without a scaler
    scale: float | None  #: the latest loss scale; None without a scaler
    observing_share: float  #: AMPscope's own time, as a share of all steps' time


class FigureKeeper:
    """Adds up the rows of steps."""

    def __init__(self) -> None:
        self._steps = 0
        self._scaled = 0  # steps through a scaler
        self._skipped = 0
        self._scale: float | None = None
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

    @property
    def now(self) -> LiveFigures:
        """The figures so far."""
        return LiveFigures(
            self._steps,
            self._skipped / self._scaled if self._scaled else None,
            self._scale,
            self._observing / self._seconds if self._seconds else 0.0,
        )
