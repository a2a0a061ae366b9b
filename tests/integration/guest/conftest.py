"""Models are trained in this process; see `tests.support.fixtures`."""

from __future__ import annotations

from tests.support.fixtures import quiet_process, watch

__all__ = ["quiet_process", "watch"]
