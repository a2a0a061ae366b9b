"""A fault of AMPscope's own fails the test."""

from __future__ import annotations

import pytest

from tests.support.training.fixtures import strict_guards

__all__ = ["strict", "strict_guards"]


@pytest.fixture(autouse=True)
def strict(strict_guards: None) -> None:
    """Of every test here."""
