"""The verb that says whether the loss scale is right."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from ampscope.cli.main import main
from tests.support.command import Command
from tests.support.trace_builder import TraceBuilder
from tests.support.verdicts.counted import SMALL, with_gradient


@pytest.fixture
def run(run_folder: Path) -> Path:
    trace = TraceBuilder(run_folder)
    for step in range(30):
        trace.step(scale=2.0**16 if step else 2.0**17, skipped=step == 0)
    with_gradient(trace, SMALL * 2.0**16, scale=2.0**16)
    return trace.close()


def test_the_verdict_comes_first_and_the_window_after_it(ampscope: Command, run: Path) -> None:
    answer = ampscope("scale", run)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.lstrip().startswith("Yes: at 65,536 (2¹⁶), none of the gradient values")
    words = " ".join(answer.out.split())
    assert "Leave the scaler as it is." in words
    assert "65,536 (2¹⁶) (now)" in words
    assert "fc.weight" in words


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_it_is_told_in_an_encoding_without_raised_digits_too(
    run: Path, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
    monkeypatch.setattr(sys, "argv", ["ampscope", "scale", str(run)])
    with pytest.raises(SystemExit) as end:
        main()
    sys.stdout.flush()
    assert not end.value.code
    assert b"65,536 (2" in written.getvalue()


def test_other_settings_are_tried_on_the_record(ampscope: Command, run: Path) -> None:
    answer = json.loads(ampscope("scale", run, "--simulate", "init_scale=65536,growth_interval=100", "--json").out)
    assert (answer["simulated"]["skipped"], answer["simulated"]["was_skipped"]) == (0, 1)
    assert answer["judgement"] == "right"
    assert answer["window"]["low"] is not None
    words = " ".join(ampscope("scale", run, "--simulate", "init_scale=65536").out.split())
    assert "0 steps would have been skipped; 1 step was." in words
    assert "init_scale=65536," in words


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("speed=3", "'speed' is no setting of a scaler"),
        ("backoff_factor=2", "backoff_factor must be between 0 and 1, not '2'"),
        ("growth_interval=1.5", "growth_interval must be a whole number above 0"),
        ("init_scale=nan", "init_scale must be above 0"),
        ("init_scale", "init_scale must be above 0, not ''"),
    ],
)
def test_settings_that_no_scaler_has_are_an_error(ampscope: Command, run: Path, asked: str, why: str) -> None:
    answer = ampscope("scale", run, "--simulate", asked)
    assert (answer.code, answer.out) == (2, "")
    assert why in answer.err
