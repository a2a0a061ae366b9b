"""Another run that goes wrong while this one is looked at."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import streamlit as st

from tests.support.page_reading import Show, Shown
from tests.support.trace_builder import TraceBuilder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    good = TraceBuilder(tmp_path / "good")
    good.step()
    good.close()
    return tmp_path


def look_again(shown: Shown) -> str:
    st.cache_resource.clear()  # a look at the folders holds for some seconds
    shown.test.run()
    return Shown(shown.test).words


@pytest.mark.parametrize("page", ["overview", "scale"])
def test_it_is_announced_with_a_way_to_it_until_it_was_looked_at(show: Show, folder: Path, page: str) -> None:
    shown = show("good", page, real=True)
    bad = TraceBuilder(folder / "bad <b>")
    bad.step()
    bad.leave_open()
    assert "bad <b>" not in look_again(shown)
    bad.step(loss=math.nan)
    bad.finding()
    bad.leave_open()
    words = look_again(shown)
    assert "Run bad <b>: gradients clipped before they were unscaled" in words
    assert "bad <b>" not in "".join(shown.raw)
    assert shown.links["Look at it"] == "run=bad+%3Cb%3E"
    shown.test.selectbox(key="run").set_value("bad <b>").run()
    shown.test.selectbox(key="run").set_value("good").run()
    assert "Run bad" not in Shown(shown.test).words
    bad.close()


def test_what_was_wrong_before_the_page_was_opened_is_not_announced(show: Show, folder: Path) -> None:
    bad = TraceBuilder(folder / "bad")
    bad.step()
    bad.finding()
    bad.close()
    assert "Run bad" not in look_again(show("good", real=True))
