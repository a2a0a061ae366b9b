"""Loops are trained in this process, as capture's are; ``--record-order`` writes the golden files anew."""

from __future__ import annotations

from tests.unit.capture.conftest import quiet_process

__all__ = ["quiet_process"]
