"""``ampscope demo``: what it promises is what happens."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from ampscope.analysis.diagnosis.diagnosis import diagnose
from ampscope.analysis.results import Incident
from ampscope.trace.vocabulary import Cause, Verdict
from tests.support.command import Command
from tests.support.trace_builder import TraceBuilder


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were called; one that would train records a short run instead."""
    commands: list[list[str]] = []

    def call(command: list[str]) -> int:
        commands.append(command)
        if "streamlit" not in command:
            folder = Path(command[-1])
            for number, run in enumerate(
                [folder / "healed", folder / "float32"] if "healed" in command[2] else [folder]
            ):
                trace = TraceBuilder(run)
                trace.step(loss=2.0 + number)
                trace.close()
        return 0

    monkeypatch.setattr(subprocess, "call", call)
    return commands


def test_trains_tells_and_opens_the_app(ampscope: Command, trained: list[list[str]], tmp_path: Path) -> None:
    answer = ampscope("demo", "--dir", tmp_path)
    run = tmp_path / "demo-gpt"
    assert answer.code == 0
    assert "HEALTHY  demo-gpt" in answer.out
    training, app = trained
    assert training[1:] == ["-m", "ampscope.demo.gpt", str(run)]
    assert app[-1] == str(run)


def test_without_the_app(ampscope: Command, trained: list[list[str]], tmp_path: Path) -> None:
    answer = ampscope("demo", "--dir", tmp_path, "--story", "digits", "--no-view")
    assert [command[2] for command in trained] == ["ampscope.demo.digits"]
    assert answer.out.endswith(f"ampscope view {tmp_path / 'demo-digits'}\n")


def test_the_healed_run_stands_beside_one_in_float32(
    ampscope: Command, trained: list[list[str]], tmp_path: Path
) -> None:
    answer = ampscope("demo", "--dir", tmp_path, "--story", "healed")
    assert "HEALTHY  healed" in answer.out
    assert "Loss of the last 50 steps: 2.000 healed, 3.000 in float32 from the same seeds." in answer.out
    training, app = trained
    assert training[1:] == ["-m", "ampscope.demo.healed", str(tmp_path / "demo-healed")]
    assert app[-1] == str(tmp_path / "demo-healed")


def test_an_earlier_demo_is_kept(ampscope: Command, trained: list[list[str]], tmp_path: Path) -> None:
    for _ in range(3):
        ampscope("demo", "--dir", tmp_path, "--no-view")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo-gpt", "demo-gpt-2", "demo-gpt-3"]


def test_without_torch_it_says_what_to_install(ampscope: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    answer = ampscope("demo", "--story", "digits")
    assert answer.code == 2
    assert answer.err.endswith("needs torch and scikit-learn; pip install 'ampscope[torch]' scikit-learn\n")


def test_a_training_that_fails(ampscope: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(subprocess, "call", lambda command: 3)
    answer = ampscope("demo", "--dir", tmp_path)
    assert answer.code == 2
    assert "stopped with exit code 3" in answer.err


@pytest.mark.slow
def test_the_gpt_breaks_where_the_attention_overflows(ampscope: Command, tmp_path: Path) -> None:
    answer = ampscope("demo", "--dir", tmp_path, "--no-view")
    assert answer.code == 0
    diagnosis = diagnose(tmp_path / "demo-gpt")
    primary = diagnosis.primary
    assert isinstance(primary, Incident)
    assert primary.cause is Cause.FP16_OVERFLOW
    assert primary.op == "aten.bmm.default"
    assert primary.module == "blocks.0.attention"
    assert primary.source is not None
    assert primary.source.code == "logits = q @ k.transpose(-2, -1)"
    assert 100 <= primary.step <= 500


@pytest.mark.slow
def test_the_digits_stay_healthy_over_a_resume(ampscope: Command, tmp_path: Path) -> None:
    assert ampscope("demo", "--dir", tmp_path, "--story", "digits", "--no-view").code == 0
    diagnosis = diagnose(tmp_path / "demo-digits")
    assert diagnosis.verdict is Verdict.HEALTHY
    assert diagnosis.run.segments == 2
    assert not diagnosis.findings
