"""Ranks that do not reduce their gradients, though their model is wrapped for it, are told."""

from __future__ import annotations

from pathlib import Path

import pytest

import ampscope
from ampscope.trace.vocabulary import Cause, Verdict
from tests.support.torchrun import on_ranks

pytest.importorskip("torch")


def test_gradients_that_nobody_reduces_are_told(tmp_path: Path) -> None:
    on_ranks("tests.integration.ranks.unreduced", tmp_path / "run", "by_nobody", ranks=2)
    (found,) = ampscope.diagnose(tmp_path / "run").findings
    assert (found.cause, found.also_on) == (Cause.RANKS_NOT_REDUCED, (1,))
    assert "other parameters than the model's 2 parameters (weight, bias)" in found.explanation


@pytest.mark.parametrize("reduced", ["by_the_loop", "by_the_wrapper"])
def test_a_twin_that_reduces_them_is_healthy(tmp_path: Path, reduced: str) -> None:
    on_ranks("tests.integration.ranks.unreduced", tmp_path / "run", reduced, ranks=2)
    told = ampscope.diagnose(tmp_path / "run")
    assert (told.verdict, told.findings) == (Verdict.HEALTHY, ())
