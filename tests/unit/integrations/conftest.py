"""Models are trained in this process; see `tests.support.training.fixtures`."""

from __future__ import annotations

from tests.support.training.fixtures import quiet_process, watch

__all__ = ["quiet_process", "watch"]
