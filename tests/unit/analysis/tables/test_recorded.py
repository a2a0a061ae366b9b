"""What is said of a run that was asked to record only a part of its healthy steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ampscope import diagnose, open_run
from ampscope.analysis.precision.ranges.ranges import ranges
from ampscope.analysis.tables.traced_steps import only_recorded
from ampscope.report.terminal import ranges_text
from ampscope.report.terminal.diagnosis_text import as_text
from tests.support.printed import printed
from tests.support.trace_builder import TraceBuilder


def run_with(folder: Path, **configuration: Any) -> Path:
    trace = TraceBuilder(folder, configuration=configuration)
    trace.op(trace.site(), source="live")
    trace.step(traced="live")
    return trace.close()


@pytest.mark.parametrize(
    ("configuration", "told"),
    [
        ({"modules": ["blocks.*"], "ops": None}, "modules='blocks.*'"),
        ({"ops": ["mm", "bmm"]}, "ops=['mm', 'bmm']"),
        ({"parameters": ["a", "b", "c", "d"]}, "parameters=['a', 'b', 'c', ...]"),
    ],
)
def test_a_part_is_named_where_nothing_else_could_be_judged(
    configuration: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with open_run(run_with(tmp_path / "run", **configuration)) as run:
        note = only_recorded(run)
        assert told in note
        words = " ".join(printed(as_text(diagnose(run)), width=400).split())
        assert note in words
        assert note in " ".join(printed(ranges_text.as_text(ranges(run)), width=400).split())


def test_where_all_is_recorded_nothing_is_said(tmp_path: Path) -> None:
    with open_run(run_with(tmp_path / "run", modules=None, ops=None, every=1)) as run:
        assert only_recorded(run) == diagnose(run).note == ranges(run).note == ""
