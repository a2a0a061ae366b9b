"""Figures as metrics, and alerts as alerts, in Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ampscope
from ampscope.capture.record.draws import separate
from ampscope.integrations.trackers._library import library
from ampscope.trace.vocabulary import Severity

#: The metric that the others are drawn over.
_STEP = "ampscope/step"
#: Characters that an alert's title may have.
_TITLE = 64
#: What of the newest alert stands in the run's summary.
_SUMMARY = ("verdict", "summary", "cause", "module", "look")


class WandB:
    """A tracker that logs to Weights & Biases, online or offline as that is set.

        ampscope.watch(model, scaler, log_to=WandB(run))

    Into a run of the loop's the figures go with what the loop logs next (``commit=False``): its step is never moved.

    Args:
        run: The loop's run; by default the one that is active, or else one of its own.
        every: Figures are logged at one step in this many.
        init: For the ``wandb.init`` of a run of its own, as ``project``.

    Raises:
        WatchError: wandb is not installed.
    """

    def __init__(self, run: Any = None, *, every: int = 10, **init: Any) -> None:
        self.every = every
        self._wandb = library("wandb", "wandb")
        separate("wandb", "urllib3")
        self._run: Any = run if run is not None else self._wandb.run if not init else None
        self._init = init
        self._is_own = self._run is None

    def begin(self, run: Path) -> None:
        """See `Tracker`. A run's ``log`` and ``alert`` hand over to its service, from any thread."""
        if self._is_own:
            settings = self._wandb.Settings(console="off")
            chosen = {"project": "ampscope", "name": run.name, "settings": settings, **self._init}
            self._run = self._wandb.init(reinit="create_new", **chosen)
        self._run.define_metric("ampscope/*", step_metric=_STEP)

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log({_STEP: step, **figures}, commit=self._is_own)

    def alert(self, alert: ampscope.Alert) -> None:
        """See `Tracker`."""
        level = self._wandb.AlertLevel
        levels: dict[str, Any] = {Severity.INFO: level.INFO, Severity.WARNING: level.WARN}
        self._run.alert(title=alert.headline[:_TITLE], text=alert.text, level=levels.get(alert.severity, level.ERROR))
        self._run.summary.update({f"ampscope/{name}": getattr(alert, name) for name in _SUMMARY})

    def close(self) -> None:
        """See `Tracker`."""
        if self._is_own and self._run is not None:
            self._run.finish()
