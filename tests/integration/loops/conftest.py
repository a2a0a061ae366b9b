"""The loops train in the test's own process; see `tests.support.training.fixtures`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ampscope
from ampscope.analysis.diagnosis.diagnosis import diagnose
from ampscope.analysis.results import Diagnosis
from tests.support.training.fixtures import quiet_process

__all__ = ["quiet_process"]


@pytest.fixture
def diagnosed(tmp_path: Path) -> Callable[[Callable[..., None]], Diagnosis]:
    """What is told of a program, which is given `ampscope.watch`."""

    import ampscope

    def told(program: Callable[..., None]) -> Diagnosis:
        scopes: list[ampscope.Scope] = []

        def watch(*given: Any) -> None:
            scopes.append(ampscope.watch(*given, dir=tmp_path / "run", quiet=True))

        torch.manual_seed(0)
        try:
            program(watch)
        except ValueError as error:
            assert "FP16 gradients" in str(error)  # noqa: PT017  # some programs end so, others do not
        for scope in scopes:
            scope.close()
        return diagnose(tmp_path / "run")

    return told
