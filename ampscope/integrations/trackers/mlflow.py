"""Figures as metrics, and alerts as tags and texts, in MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ampscope
from ampscope.capture.record.draws import separate
from ampscope.integrations.trackers._library import library

#: Characters of a tag that every store takes.
_TAG = 5000


class MLflow:
    """A tracker that logs to an MLflow run, in whichever store.

        ampscope.watch(model, scaler, log_to=MLflow())

    Args:
        run_id: The loop's run; by default the one that is active where the tracker is made, or else one of its own.
        client: The ``MlflowClient`` to use; by default one for ``mlflow.get_tracking_uri()``.
        experiment: Name of the experiment for a run of its own.
        every: Figures are logged at one step in this many.

    Raises:
        WatchError: MLflow is not installed.
    """

    def __init__(
        self, run_id: str | None = None, *, client: Any = None, experiment: str = "ampscope", every: int = 10
    ) -> None:
        self.every = every
        self._mlflow = library("mlflow", "mlflow")
        separate("mlflow", "urllib3")
        active = self._mlflow.active_run() if run_id is None else None  # it is this thread's alone
        self._run_id = active.info.run_id if active is not None else run_id
        self._client = client
        self._experiment = experiment
        self._is_own = self._run_id is None

    def begin(self, run: Path) -> None:
        """See `Tracker`. A client keeps no state: it may be used by several threads."""
        if self._client is None:
            self._client = self._mlflow.MlflowClient()
        if self._is_own:
            found = self._client.get_experiment_by_name(self._experiment)
            separate("mlflow", "urllib3")  # it was that call that imported the store
            number = found.experiment_id if found is not None else self._client.create_experiment(self._experiment)
            self._run_id = self._client.create_run(number, run_name=run.name).info.run_id
        self._client.set_tag(self._run_id, "ampscope.run", str(run))

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """See `Tracker`."""
        now, metric = int(time.time() * 1000), self._mlflow.entities.Metric
        self._client.log_batch(
            self._run_id, metrics=[metric(name, value, now, step) for name, value in figures.items()]
        )

    def alert(self, alert: ampscope.Alert) -> None:
        """See `Tracker`."""
        told = {"verdict": alert.verdict, "cause": alert.cause, "alert": alert.text}
        for name, text in told.items():
            if text:
                self._client.set_tag(self._run_id, f"ampscope.{name}", text[:_TAG])
        self._client.log_text(self._run_id, alert.text, f"ampscope/{alert.kind}-{alert.step}.txt")

    def close(self) -> None:
        """See `Tracker`."""
        if self._is_own and self._run_id is not None:
            self._client.set_terminated(self._run_id)
