"""The diagnosis in the terminal."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ampscope.analysis.results import Tried
from ampscope.report.terminal.diagnosis_text import as_text
from ampscope.trace.schema import Change, Trial
from tests.support.printed import printed
from tests.support.verdicts.by_hand import (
    BROKEN,
    CLIPPED,
    EMPTY,
    HEALTHY,
    LINE,
    MISUSED,
    OVERFLOW,
    QUERY,
    hostile,
    node,
)
from tests.support.verdicts.operands import changed


def test_a_broken_run_reads_from_verdict_to_cure() -> None:
    text = printed(as_text(BROKEN), width=200)
    landmarks = [
        "PROBLEM  gpt",
        "GPT with 114,270 parameters on cpu; 41,900 steps, 7 skipped, resumed 1 time; closed",
        "Step 294 had a non-finite loss.",
        "aten.bmm.default in blocks.0.attention (Attention), forward, steps 294 to 299 (6 times)",
        "/home/me/gpt.py:47 in Attention.forward",
        "      logits = q @ k.transpose(-2, -1)",
        OVERFLOW.explanation,
        "Last good step: 293. Since then: the learning rate went from 0.001 to 0.1 at step 291",
        "-59,648 to inf",
        "4 inf",
        "... 6 more",
        "In float32 the same step is finite.",
        "1. Scale the queries first. [tried on this step: cures it]",
        "      q = q * q.shape[-1] ** -0.5\n      logits = q @ k",
        "2. Lower the loss scale. [tried on this step: does not cure it]",
        "3. Use bfloat16. [not tried: its turn did not come]\n",
        "Also",
        "steps 0 to 299 (300 times): gradients clipped before they were unscaled at /home/me/train.py:12.",
        "Harmless, nothing to change",
        "step 3: the scale finding its place. This is how GradScaler works.",
    ]
    places = [text.find(landmark) for landmark in landmarks]
    assert -1 not in places, landmarks[places.index(-1)]
    assert places == sorted(places)


def test_what_where_and_why_say_their_own_thing_once() -> None:
    text = printed(as_text(BROKEN), width=400)
    for once in (OVERFLOW.explanation, "Step 294 had a non-finite loss.", "gpt.py:47 in", "In float32"):
        assert text.count(once) == 1
    assert BROKEN.summary not in text


def test_the_numbers_of_the_cause_stand_under_what_happened() -> None:
    in_float32 = Tried(step=294, change=Change.FP32, outcome=Trial.FINITE, op_min=-70920.0, op_max=4.0)
    told = printed(as_text(replace(BROKEN, primary=replace(OVERFLOW, tried=(in_float32,)))))
    assert "non-finite loss.\n  70,920 needed, 65,504 available in float16\n" in told


def test_a_healthy_run_is_calm() -> None:
    text = printed(as_text(HEALTHY))
    assert "HEALTHY  digits" in text
    assert "Where" not in text
    assert "Also" not in text
    assert "Harmless, nothing to change" in text


def test_a_usage_mistake_names_the_loop() -> None:
    text = printed(as_text(MISUSED))
    assert "Your training loop, steps 0 to 299 (300 times)\n  /home/me/train.py:12" in text
    assert "Evidence" not in text
    assert "scaler.unscale_(optimizer)" in text


def test_a_mistake_whose_first_time_alone_is_known_did_not_happen_once() -> None:
    first = replace(CLIPPED, last_step=0, count=1, counted=False)
    assert "Your training loop, from step 0 on\n" in printed(as_text(replace(MISUSED, primary=first)))
    once = replace(first, counted=True)
    assert "Your training loop, step 0\n" in printed(as_text(replace(MISUSED, primary=once)))


def test_a_run_without_steps() -> None:
    assert "no model on an unknown device; 0 steps, 0 skipped" in printed(as_text(EMPTY))


def test_what_was_not_measured_is_left_out() -> None:
    bare = changed(QUERY, min=None, max=None, numel=None, nan=None, zeros=None, max_finite=None, min_positive=None)
    incident = replace(OVERFLOW, inputs=(bare,), outputs=(), path=(), replay="", traced="", fp32_ok=None)
    text = printed(as_text(replace(BROKEN, primary=incident)))
    assert re.search(r"^  tensor +dtype +shape$", text, re.MULTILINE)
    assert "Path" not in text
    assert "Checked" not in text


def test_an_incident_without_an_op() -> None:
    incident = replace(OVERFLOW, op="", module="", module_type="", source=None, explanation="", phase="optimizer")
    text = printed(as_text(replace(BROKEN, primary=incident)))
    assert "No single op, optimizer, steps 294 to 299" in text
    assert "A value too large for float16." in text


def test_a_short_path_is_shown_whole() -> None:
    path = tuple(node(seq, f"aten.op{seq}.default") for seq in range(9))
    text = printed(as_text(replace(BROKEN, primary=replace(OVERFLOW, path=path))))
    assert "more" not in text
    assert all(f"op{seq} " in text for seq in range(9))


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_it_fits_the_terminal(width: int) -> None:
    code = {line for remedy in OVERFLOW.remedies for line in remedy.code.splitlines()} | {LINE.code}
    for line in printed(as_text(BROKEN), width=width).splitlines():
        assert len(line) <= width or line.strip() in code


def test_a_narrow_terminal_keeps_what_matters_most() -> None:
    assert "smallest nonzero" in printed(as_text(BROKEN), width=120)
    narrow = printed(as_text(BROKEN), width=60)
    assert "nonzero" not in narrow
    assert re.search(r"output 0 +float16 +-59,648 to inf +4 inf", narrow)


def test_code_is_never_wrapped() -> None:
    code = "y = " + " + ".join(["some_long_name"] * 20)
    diagnosis = replace(BROKEN, primary=replace(OVERFLOW, source=replace(LINE, code=code)))
    assert code in printed(as_text(diagnosis), width=40)


def test_a_file_below_the_working_directory_is_named_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = replace(LINE, file=str(tmp_path / "src" / "gpt.py"))
    text = printed(as_text(replace(BROKEN, primary=replace(OVERFLOW, source=here))), width=200)
    assert "\n  src/gpt.py:47 in" in text


def test_text_from_a_trace_is_only_text() -> None:
    text = printed(as_text(hostile()), width=300)
    assert "[bold red]x[/bold red] :smile: \\x1b[31mred\\x1b[0m \\x07 \\u202egnp.exe\\u2066 [link=" in text
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    escapes = set(re.findall(r"\x1b.", printed(as_text(hostile()), colours=True)))
    assert escapes <= {"\x1b["}


def test_colours_only_on_a_terminal() -> None:
    assert "\x1b" not in printed(as_text(BROKEN))
    assert "\x1b[" in printed(as_text(BROKEN), colours=True)
