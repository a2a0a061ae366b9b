"""The table of every page, as a reader uses it: sort, filter, unfold, save, follow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs the dev extra: pip install 'ampscope[dev]'")

from playwright.sync_api import Locator, expect

from tests.integration.browser.driver import goto, serve, settle
from tests.integration.browser.watched import Watched
from tests.support.trace_builder import TraceBuilder

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def stuck(tmp_path_factory: pytest.TempPathFactory, browser: object) -> Iterator[str]:
    """A run whose last 213 steps were skipped in the same way; skips before them differ."""
    folder = tmp_path_factory.mktemp("stuck")
    trace = TraceBuilder(folder / "stuck")
    for step in range(240):
        bad = step >= 22
        scale = 2.0 ** (30 - step) if step < 27 else 0.5
        trace.step(skipped=bad, found_inf=bad, loss=math.nan if bad else 1.0, scale=scale)
    trace.close()
    with serve(folder) as address:
        yield address


def first_cells(table: Locator) -> list[str]:
    return table.locator("tbody tr td:first-child").all_inner_texts()


def test_it_is_unfolded_sorted_filtered_saved_and_followed(watched: Watched, stuck: str) -> None:
    page = watched.page
    goto(page, stuck, "scale", run="stuck")
    table = page.get_by_role("table", name="Skipped steps")
    assert first_cells(table) == ["213 steps like this, 27\N{EN DASH}239", "26", "25", "24", "23", "22"]
    fold = table.get_by_role("button", name="213 steps like this")
    fold.focus()
    page.keyboard.press("Enter")
    expect(fold).to_have_attribute("aria-expanded", "true")
    expect(fold).to_be_focused()
    assert first_cells(table)[:2] == ["213 steps like this, 27\N{EN DASH}239", "239"]
    assert len(first_cells(table)) == 30
    fold.click()
    head = table.get_by_role("button", name="Step", exact=True)
    head.click()
    assert first_cells(table)[:2] == ["22", "23"]
    expect(table.get_by_role("columnheader", name="Step")).to_have_attribute("aria-sort", "ascending")
    page.get_by_label("Filter: Skipped steps").fill("24")
    assert first_cells(table)[0] == "24"
    assert table.locator("mark").first.inner_text() == "24"
    with page.expect_download() as saved:
        page.get_by_role("button", name="CSV: Skipped steps").click()
    lines = Path(saved.value.path()).read_text("utf-8").splitlines()
    assert lines[0].startswith("Step,Loss scale,Loss")
    assert [line.split(",")[0] for line in lines[1:]] == ["24", "124", "224"]  # what the filter leaves
    page.evaluate("window.stays = true")  # a followed link loads nothing anew
    table.get_by_role("link", name="24").click()
    expect(page.get_by_role("heading", name="At step 24")).to_be_visible()
    settle(page)
    assert page.evaluate("window.stays") is True
    assert "step=24" in page.url
    assert watched.complaints == []
