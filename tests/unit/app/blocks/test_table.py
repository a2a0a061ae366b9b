"""The table of every page: what is folded, by what a column sorts, where a row leads."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blocks.components.data_table import Cell
from blocks.page_links import Way
from blocks.table import folds
from state import Page
from tests.support.page_reading import Show
from tests.support.trace_builder import TraceBuilder


def rows(*cells: str) -> list[tuple[Cell, ...]]:
    return [(Cell(str(number)), Cell(cell)) for number, cell in enumerate(cells)]


def test_neighbours_that_say_the_same_are_folded() -> None:
    assert folds(rows(*"aaaabcccccd"), 0) == [(0, 3), (5, 9)]
    assert folds(rows(*"aaaa"), 0) == [(0, 3)]


def test_a_few_are_not_nor_those_that_differ_elsewhere() -> None:
    assert folds(rows(*"aaabbb"), 0) == []
    assert folds(rows(*"aaaa"), 1) == []
    assert folds([], 0) == []


def test_a_click_leads_where_the_row_led_though_another_came_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from blocks import table as module

    clicks: list[Any] = []
    led: list[Way] = []
    monkeypatch.setattr(module, "st", SimpleNamespace(session_state={}))
    monkeypatch.setattr(module, "data_table", lambda key, told, on_go: clicks.append(on_go))
    monkeypatch.setattr(module, "switch_to", led.append)
    old, newer = (Way(Page.OVERVIEW, {"run": name}) for name in ("old", "newer"))
    module.table("Runs", ("Run",), [("old",)], ways=[old])
    clicks[0](0)
    module.table("Runs", ("Run",), [("newer",), ("old",)], ways=[newer, old])
    assert led == [old]


def test_skipped_steps_are_folded_and_lead_to_their_place_in_the_history(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    trace = TraceBuilder(tmp_path / "stuck")
    for step in range(30):
        trace.step(skipped=step >= 10, found_inf=step >= 10, loss=math.nan if step >= 10 else 1.0, scale=2.0)
    trace.close()
    shown = show("stuck", "scale", real=True)
    (table,) = (json.loads(one.proto.json) for one in shown.test.get("bidi_component") if "Skipped" in one.proto.json)
    assert table["folds"] == [[0, 19]]
    assert table["fold"] == "Step"
    assert table["rows"][0][0] == ["29", 29, "", None]
    assert table["rows"][0][2] == "NaN"
    assert shown.ways["Skipped steps"]["29"] == "scale?run=stuck&step=29"
