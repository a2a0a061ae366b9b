"""What a loss scaler did over a run: its curve, its changes, its calls and its share of skipped steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ampscope.analysis.numerics.arrays import BoolArray, Columns, FloatArray, IntArray
from ampscope.analysis.numerics.curve import Curve, make_curve, thin_marks
from ampscope.analysis.results import ScaleHealth
from ampscope.analysis.scale.health import scale_health
from ampscope.analysis.scale.moves import Move, moves_of_events, moves_of_steps, scale_after
from ampscope.analysis.scale.scaler_log import (
    ScaleEvent,
    ScalerCall,
    ScalerLog,
    ScalerSettings,
    scale_event,
    scaler_log,
    settings_of,
)
from ampscope.analysis.tables.lazy_tables import first_rank
from ampscope.analysis.tables.step_queries import in_order, log2_curve, measured, step_optimizers, steps_of
from ampscope.notebook_repr import NotebookRepr
from ampscope.trace.read.run import Run
from ampscope.trace.schema import ScalerEventRow

#: Attempts over which the recent share of skips is taken.
RECENT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleHistory(NotebookRepr):
    """The scaler as one optimizer saw it.

    It has many attributes because it holds the counts and the curves of one page together.
    """

    rank: int = 0
    optimizer: int = 0
    optimizers: tuple[int, ...] = ()
    scalers: int = 0  #: number of scalers in the run
    settings: ScalerSettings = field(default_factory=ScalerSettings)
    steps: int = 0
    skipped: int = 0
    recent_steps: int = 0  #: the last steps, `RECENT` at most
    recent_skipped: int = 0
    first: float | None = None  #: scale of the first step that has one
    current: float | None = None
    lowest: float | None = None
    log2_scale: Curve = field(default_factory=Curve)  #: a scale of 0 counts as not finite
    growth_tracker: Curve = field(default_factory=Curve)
    skips: tuple[int, ...] = ()  #: thinned; `skipped` is the true number
    moves: tuple[Move, ...] = ()
    events: tuple[ScaleEvent, ...] = ()
    calls: tuple[ScalerCall, ...] = ()
    health: ScaleHealth | None = None  #: null where no step had a scale

    @property
    def is_scaled(self) -> bool:
        """Whether any step ran with a loss scale."""
        return self.first is not None

    @property
    def skipped_share(self) -> float | None:
        """Skipped attempts as a share of all attempts."""
        return self.skipped / self.steps if self.steps else None


def scale_history(run: Run, *, optimizer: int | None = None, rank: int | None = None) -> ScaleHistory:
    """The history seen by ``optimizer`` on ``rank`` (by default the run's first); an empty run gives an empty one."""
    rank = first_rank(run) if rank is None else rank
    optimizers = step_optimizers(run, rank)
    if not optimizers:
        return ScaleHistory()
    chosen = optimizers[0] if optimizer is None else optimizer
    steps = steps_of(run, rank, chosen).select("step", "loss", "scale", "growth_tracker", "skipped")
    history = _history(in_order(steps), scaler_log(run, chosen, rank))
    return replace(history, optimizer=chosen, optimizers=optimizers, rank=rank)


def _history(steps: Columns, log: ScalerLog) -> ScaleHistory:
    at, scales = measured(steps, "scale")
    settings = settings_of(log.changes)
    current = _current(log.changes, at, scales)
    skipped = steps.flags("skipped")
    return ScaleHistory(
        scalers=log.scalers,
        settings=settings,
        steps=len(steps),
        skipped=int(skipped.sum()),
        recent_steps=min(len(steps), RECENT),
        recent_skipped=int(skipped[-RECENT:].sum()),
        first=float(scales[0]) if len(scales) else None,
        current=current,
        lowest=min(float(scales.min()), current) if len(scales) and current is not None else None,
        log2_scale=log2_curve(steps),
        growth_tracker=make_curve(*measured(steps, "growth_tracker")),
        skips=thin_marks(steps.ints("step")[skipped]),
        moves=moves_of_events(log.changes) or moves_of_steps(at, scales),
        events=tuple(scale_event(row) for row in log.changes),
        calls=log.calls,
        health=scale_health(_Attempts.of(steps), settings),
    )


class _Attempts(NamedTuple):
    """See `ampscope.analysis.scale.health.Attempts`."""

    optimizer: int
    step: IntArray
    scale: FloatArray
    skipped: BoolArray
    bad_loss: BoolArray

    @classmethod
    def of(cls, steps: Columns) -> _Attempts:
        return cls(0, steps.ints("step"), steps.floats("scale"), steps.flags("skipped"), steps.bad("loss"))


def _current(changes: tuple[ScalerEventRow, ...], at: IntArray, scales: FloatArray) -> float | None:
    """The scale that the next step will use: the newest step's, unless an event changed it after that step."""
    changed = scale_after(changes, int(at[-1]) if len(at) else -1)
    return float(scales[-1]) if changed is None and len(scales) else changed
