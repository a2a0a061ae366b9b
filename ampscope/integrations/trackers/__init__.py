"""Trackers for ``ampscope.watch(..., log_to=...)``: each sends a run's figures and alerts through its own library."""

from __future__ import annotations

from ampscope.integrations.trackers.mlflow import MLflow
from ampscope.integrations.trackers.opentelemetry import OpenTelemetry
from ampscope.integrations.trackers.tensorboard import TensorBoard
from ampscope.integrations.trackers.wandb import WandB

__all__ = ["MLflow", "OpenTelemetry", "TensorBoard", "WandB"]
