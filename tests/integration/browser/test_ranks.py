"""Several ranks: one to choose on every page, links that name it, and a page for all of them."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("playwright", reason="needs the dev extra: pip install 'ampscope[dev]'")

from playwright.sync_api import Locator, Page, expect

from tests.integration.browser.driver import goto, settle
from tests.integration.browser.watched import Watched

pytestmark = pytest.mark.browser


def _rank(page: Page) -> str:
    """The chip of the rank on screen."""
    return page.locator(".st-key-rank").get_by_role("radio", checked=True).inner_text()


def _ends_at(cell: Locator) -> float:
    """How far to the right something reaches, in pixels of the window."""
    return float(cell.evaluate("one => one.getBoundingClientRect().right"))


def test_replay_it_opens_the_right_rank(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "", run="ranks")
    expect(page.get_by_text("on rank 1 of 4").first).to_be_visible()
    page.get_by_test_id("stPageLink").filter(has_text="Replay it").click()
    page.get_by_role("heading", name="Replay", exact=True).wait_for()
    settle(page)
    expect(page).to_have_url(re.compile(r"[?&]rank=1(&|$)"))
    assert "Rank 1" in _rank(page)
    assert page.locator("[data-testid=stException]").count() == 0
    assert watched.complaints == []


def test_the_rank_that_is_chosen_goes_along(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "scale", run="ranks")
    page.locator(".st-key-rank").get_by_text("Rank 2").click()
    settle(page)
    expect(page).to_have_url(re.compile(r"[?&]rank=2(&|$)"))
    page.locator("[data-testid=stSidebar] [data-testid=stPageLink-NavLink]").filter(has_text="Usage").click()
    page.get_by_role("heading", name="Usage", exact=True).wait_for()
    settle(page)
    assert "Rank 2" in _rank(page)
    assert watched.complaints == []


def test_the_page_is_offered_where_there_are_ranks(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "", run="ranks")
    expect(
        page.locator("[data-testid=stSidebar] [data-testid=stPageLink-NavLink]").filter(has_text="Ranks")
    ).to_have_count(1)
    goto(page, address, "", run="healthy")
    expect(
        page.locator("[data-testid=stSidebar] [data-testid=stPageLink-NavLink]").filter(has_text="Ranks")
    ).to_have_count(0)
    assert watched.complaints == []


def test_the_first_page_opens_on_the_rank_of_what_it_tells(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "", run="ranks")
    assert "Rank 1" in _rank(page)
    assert watched.complaints == []


def test_nothing_runs_off_a_narrow_page(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "ranks", run="ranks")
    page.set_viewport_size({"width": 480, "height": 900})
    settle(page)
    main = page.locator("[data-testid=stMain]")
    assert main.evaluate("one => one.scrollWidth - one.clientWidth") <= 1
    for table in page.locator(".amp-table").all():
        cells = table.locator("td").all()
        assert cells
        assert all(cell.bounding_box() is None or _ends_at(cell) <= 480 for cell in cells)
    told = page.locator(".amp-table").last.locator("tbody tr").first
    expect(told).to_contain_text("finished")
    assert "Mean loss" in told.evaluate("row => [...row.cells].map(cell => cell.dataset.column).join()")
