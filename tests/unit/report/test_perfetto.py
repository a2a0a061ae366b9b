"""A traced step in the Trace Event Format."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import Command
from tests.support.paths import SAMPLES

RUN = SAMPLES / "attention-overflow"


@pytest.fixture
def events(ampscope: Command, tmp_path: Path) -> list[dict[str, Any]]:
    answer = ampscope("perfetto", RUN, "--step", 294, "-o", tmp_path / "step.json")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("Wrote step 294 (")
    found: list[dict[str, Any]] = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    return found


def test_modules_hold_their_ops(events: list[dict[str, Any]]) -> None:
    slices = [event for event in events if event["ph"] == "X"]
    [first, *_] = [each for each in slices if each["name"] == "blocks.0.attention" and each["cat"] == "module"]
    inside = [
        each
        for each in slices
        if each["cat"] == "op" and first["ts"] <= each["ts"] < each["ts"] + each["dur"] <= first["ts"] + first["dur"]
    ]
    bad = next(each for each in inside if each["name"] == "bmm")
    assert (bad["args"]["finite"], bad["args"]["dtype"], bad["cname"]) == (False, "float16", "terrible")
    assert "logits = q @ k.transpose(-2, -1)" in bad["args"]["line"]


def test_slices_of_a_track_nest(events: list[dict[str, Any]]) -> None:
    """As the format asks for: of two that overlap, one holds the other, and comes first."""
    around: list[int] = []
    slices = [event for event in events if event["ph"] == "X"]
    for each in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        while around and around[-1] <= each["ts"]:
            around.pop()
        assert not around or each["ts"] + each["dur"] <= around[-1], each
        around.append(each["ts"] + each["dur"])


def test_every_arrow_has_two_ends_in_order(events: list[dict[str, Any]]) -> None:
    ends = Counter(event["ph"] for event in events)
    assert ends["s"] == ends["f"] > 0
    begins = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    assert all(begins[event["id"]] < event["ts"] for event in events if event["ph"] == "f")


def test_a_step_that_was_not_traced_is_an_error(ampscope: Command, tmp_path: Path) -> None:
    answer = ampscope("perfetto", RUN, "--step", 295_000, "-o", tmp_path / "step.json")
    assert (answer.code, "no such traced step" in answer.err) == (2, True)
