"""The list of runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ampscope.report.runs import ListedRun, as_list
from tests.cli.printed import printed
from tests.cli.verdicts import BROKEN, EMPTY, HEALTHY, HOSTILE, MISUSED


def test_a_line_for_each_run() -> None:
    text = printed(
        as_list(
            [
                ListedRun(path=Path("runs/gpt"), diagnosis=BROKEN),
                ListedRun(path=Path("runs/digits"), diagnosis=HEALTHY),
                ListedRun(path=Path("runs/loop"), diagnosis=MISUSED),
                ListedRun(path=Path("runs/new"), diagnosis=EMPTY),
                ListedRun(path=Path("runs/old"), diagnosis=None, problem="run.json cannot be read"),
            ]
        ),
        width=160,
    )
    title, _, *lines = text.splitlines()
    assert title.split() == ["run", "started", "steps", "skipped", "verdict", "what"]
    assert [line.split()[0] for line in lines] == ["runs/gpt", "runs/digits", "runs/loop", "runs/new", "runs/old"]
    assert "problem" in lines[0]
    assert lines[0].endswith("step 294: a value too large for float16 at gpt.py:47")
    assert lines[1].endswith("healthy")
    assert lines[2].endswith("gradients clipped before they were unscaled at train.py:12")
    assert lines[4].endswith("unreadable   run.json cannot be read")


def test_names_are_only_text() -> None:
    text = printed(as_list([ListedRun(path=Path(HOSTILE), diagnosis=replace(HEALTHY))]), width=200)
    assert "[bold red]x[/bold red] :smile: \\x1b[31mred" in text
    assert "\x1b" not in text
