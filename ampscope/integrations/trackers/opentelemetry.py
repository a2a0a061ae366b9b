"""Figures as gauges, and alerts as a counter and as events, of OpenTelemetry; so also for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ampscope
from ampscope.integrations.trackers._library import library
from ampscope.trace.vocabulary import Severity

#: What the gauges measure, by the end of their names, with the unit as OpenTelemetry writes units.
_GAUGES = {
    "loss_scale": ("1", "Loss scale of the gradient scaler"),
    "grad_norm": ("1", "L2 norm of the unscaled gradients, before clipping"),
    "skipped_share": ("1", "Share of optimizer steps that the scaler skipped"),
    "headroom_bits": ("bit", "Factors of two up to overflow, of the value that came closest to it"),
    "observing_share": ("1", "Time spent by AMPscope, as a share of the steps' time"),
}


class OpenTelemetry:
    """A tracker whose instruments belong to a meter: any reader and exporter of the loop's, Prometheus' too.

        ampscope.watch(model, scaler, log_to=OpenTelemetry())

    Gauges are ``ampscope.loss_scale`` and so on, and ``ampscope.step``; ``ampscope.alerts`` counts alerts by ``kind``
    and ``cause``. Each alert is an event, too (``ampscope.incident``), for whoever has a logger provider.

    Args:
        meter: Where the instruments are made; by default in the global meter provider.
        logger: Takes the events; by default of the global logger provider.
        attributes: Of every measurement, as ``{"job": "gpt"}``; by default the run's name as ``run``.
        every: Figures are set at one step in this many.

    Raises:
        WatchError: OpenTelemetry is not installed.
    """

    def __init__(
        self, meter: Any = None, *, logger: Any = None, attributes: Mapping[str, str] | None = None, every: int = 10
    ) -> None:
        self.every = every
        metrics, self._logs = library("opentelemetry.metrics", "otel"), library("opentelemetry._logs", "otel")
        self._meter = meter if meter is not None else metrics.get_meter("ampscope", ampscope.__version__)
        self._logger = logger if logger is not None else self._logs.get_logger("ampscope", ampscope.__version__)
        self._attributes = dict(attributes) if attributes is not None else None

    def begin(self, run: Path) -> None:
        """See `Tracker`. Instruments may be used by several threads."""
        if self._attributes is None:
            self._attributes = {"run": run.name}
        self._gauges = {
            f"ampscope/{name}": self._meter.create_gauge(f"ampscope.{name}", unit=unit, description=text)
            for name, (unit, text) in _GAUGES.items()
        }
        self._step = self._meter.create_gauge("ampscope.step", description="Newest optimizer step")
        self._alerts = self._meter.create_counter("ampscope.alerts", description="Incidents, mistakes and warnings")

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._step.set(step, self._attributes)
        for name, value in figures.items():
            self._gauges[name].set(value, self._attributes)

    def alert(self, alert: ampscope.Alert) -> None:
        """See `Tracker`."""
        of_kind = {**(self._attributes or {}), "kind": alert.kind.value, "cause": alert.cause or "unknown"}
        self._alerts.add(1, of_kind)
        number = self._logs.SeverityNumber
        severities: dict[str, Any] = {Severity.INFO: number.INFO, Severity.WARNING: number.WARN}
        facts = ("step", "rank", "replay", "verdict", "op", "module", "file", "line", "look")
        self._logger.emit(
            self._logs.LogRecord(
                timestamp=int(alert.time * 1e9),
                severity_number=severities.get(alert.severity, number.ERROR),
                body=alert.text,
                attributes={**of_kind, **{f"ampscope.{name}": getattr(alert, name) for name in facts}},
                event_name=f"ampscope.{alert.kind}",
            )
        )

    def close(self) -> None:
        """See `Tracker`; the provider belongs to the loop."""
