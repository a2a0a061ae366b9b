"""The list of runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ampscope.analysis.run_list import RunSummary
from ampscope.report.runs import ListedRun, as_list
from tests.cli.printed import printed
from tests.cli.verdicts import BROKEN, EMPTY, HEALTHY, HOSTILE, MISUSED


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
    assert lines[2].endswith("gradients clipped before they were unscaled at train.py:12")
    assert lines[4].endswith("not examined   2 incidents and 1 finding recorded")
    assert lines[5].endswith("unreadable     run.json cannot be read")


def test_names_are_only_text() -> None:
    text = printed(as_list([ListedRun(summary=seen(HOSTILE), diagnosis=replace(HEALTHY))]), width=200)
    assert "[bold red]x[/bold red] :smile: \\x1b[31mred" in text
    assert "\x1b" not in text
