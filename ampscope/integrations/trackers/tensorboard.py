"""Figures as scalars, and alerts as text, in TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ampscope
from ampscope.errors import WatchError
from ampscope.integrations.trackers._library import library


class TensorBoard:
    """A tracker that writes TensorBoard's event files.

        ampscope.watch(model, scaler, log_to=TensorBoard(writer))

    Args:
        writer: The loop's ``SummaryWriter`` (torch's or tensorboardX's), or a folder for one of its own.
        every: Figures are written at one step in this many.

    Raises:
        WatchError: TensorBoard is not installed, or ``writer`` is none.
    """

    def __init__(self, writer: Any, *, every: int = 10) -> None:
        self.every = every
        self._writer = writer
        self._folder = writer if isinstance(writer, (str, os.PathLike)) else None
        if self._folder is not None:
            self._make = library("torch.utils.tensorboard", "tensorboard").SummaryWriter
        elif not all(callable(getattr(writer, name, None)) for name in ("add_scalar", "add_text", "flush")):
            raise WatchError(f"TensorBoard takes a SummaryWriter or a folder, not {type(writer).__name__}")

    def begin(self, run: Path) -> None:
        """See `Tracker`. A writer queues what it is given, and may be used by several threads."""
        if self._folder is not None:
            self._writer = self._make(os.fspath(self._folder))

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """See `Tracker`."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def alert(self, alert: ampscope.Alert) -> None:
        """See `Tracker`."""
        self._writer.add_text(f"ampscope/{alert.kind}", alert.text.replace("\n", "  \n"), alert.step)
        self._writer.flush()

    def close(self) -> None:
        """See `Tracker`."""
        self._writer.close() if self._folder is not None else self._writer.flush()
