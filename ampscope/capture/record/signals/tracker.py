"""Defines the protocol of trackers; `ampscope.integrations.trackers` has those for known libraries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from ampscope.capture.record.signals.alert import Alert


@runtime_checkable
class Tracker(Protocol):
    """A destination for a run's figures and alerts, besides its trace.

    Its methods are called one after the other, all on one thread that belongs to the tracker alone, never on the
    training's. One that raises, or does not return, switches the tracker off; nobody waits for it.

    Attributes:
        every: Figures are sent at one step in this many.
    """

    every: int

    def begin(self, run: Path) -> None:
        """Called first: makes the client, where the user has not given one.

        Args:
            run: The run's folder.
        """

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """The figures of a step.

        Args:
            step: Its number.
            figures: By name, as ``ampscope/loss_scale``; only those that are known and finite.
        """

    def alert(self, alert: Alert) -> None:
        """Something needs a look."""

    def close(self) -> None:
        """Called last: writes what waits, and closes a client that the tracker has made itself."""
