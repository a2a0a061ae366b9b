"""Trainings run in the test's process, whose classes and hooks stay as they were; Lightning's hints are no errors."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning")

from tests.support.training.fixtures import quiet_process, strict_guards  # noqa: E402  # after the checks

__all__ = ["quiet_process", "strict_guards"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "frameworks/lightning" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.usefixtures("strict_guards"))
