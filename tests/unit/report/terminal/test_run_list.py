"""The list of runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ampscope.analysis.overview.run_list import RunSummary
from ampscope.report.terminal.runs_text import ListedRun, as_list
from tests.support.printed import printed
from tests.support.verdicts.by_hand import BROKEN, EMPTY, HEALTHY, HOSTILE, MISUSED


def seen(path: str, **facts: Any) -> RunSummary:
    return RunSummary(path=Path(path), **facts)


def test_a_line_for_each_run() -> None:
    text = printed(
        as_list(
            [
                ListedRun(summary=seen("runs/gpt"), diagnosis=BROKEN),
                ListedRun(summary=seen("runs/digits"), diagnosis=HEALTHY),
                ListedRun(summary=seen("runs/loop"), diagnosis=MISUSED),
                ListedRun(summary=seen("runs/new"), diagnosis=EMPTY),
                ListedRun(summary=seen("runs/quick", incidents=2, findings=1)),
                ListedRun(summary=seen("runs/old", problem="run.json cannot be read")),
            ]
        ),
        width=160,
    )
    title, _, *lines = text.splitlines()
    assert title.split() == ["run", "started", "steps", "skipped", "verdict", "what"]
    names = ["runs/gpt", "runs/digits", "runs/loop", "runs/new", "runs/quick", "runs/old"]
    assert [line.split()[0] for line in lines] == names
    assert "problem" in lines[0]
    assert lines[0].endswith("step 294: a value too large for float16 at gpt.py:47")
    assert lines[1].endswith("healthy")
    assert lines[2].endswith("steps 0 to 299 (300 times): gradients clipped before they were unscaled at train.py:12")
    assert lines[4].endswith("not examined   2 incidents and 1 finding recorded")
    assert lines[5].endswith("unreadable     run.json cannot be read")


LONG = "ampscope_runs/20261121-183204-TransformerForCausalLM"
ROWS = [
    ListedRun(summary=seen(LONG), diagnosis=BROKEN),
    ListedRun(summary=seen("ampscope_runs/20261121-170102-Net"), diagnosis=MISUSED),
    ListedRun(summary=seen("ampscope_runs/old"), diagnosis=HEALTHY),
    ListedRun(summary=seen("ampscope_runs/torn", problem="run.json cannot be read; restore it from a backup")),
]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 160])
def test_a_name_is_whole_in_every_terminal(width: int) -> None:
    lines = printed(as_list(ROWS), width=width, terminal=True).splitlines()
    names = [str(row.summary.path) for row in ROWS]
    assert [line.split()[0] for line in lines if line.startswith("ampscope_runs/")] == names
    assert all(len(line) <= width or line in names for line in lines)


def test_a_narrow_terminal_keeps_verdict_and_cause() -> None:
    wide, narrow = (printed(as_list(ROWS[1:]), width=width, terminal=True) for width in (200, 80))
    assert wide.splitlines()[0].split() == ["run", "started", "steps", "skipped", "verdict", "what"]
    assert narrow.splitlines()[0].split() == ["run", "verdict", "what"]
    assert "run.json cannot be" in narrow


def test_the_narrowest_puts_the_verdict_below_the_name() -> None:
    lines = printed(as_list(ROWS), width=70, terminal=True).splitlines()
    assert lines[:2] == [LONG, "  problem  step 294: a value too large for float16 at gpt.py:47"]


def test_a_pipe_gets_one_line_a_run() -> None:
    lines = printed(as_list(ROWS), width=30).splitlines()
    assert len(lines) == 2 + len(ROWS)
    assert lines[2].endswith("step 294: a value too large for float16 at gpt.py:47")


def test_names_are_only_text() -> None:
    text = printed(as_list([ListedRun(summary=seen(HOSTILE), diagnosis=replace(HEALTHY))]), width=200)
    assert "[bold red]x[/bold red] :smile: \\x1b[31mred" in text
    assert "\x1b" not in text
