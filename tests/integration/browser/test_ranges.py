from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs the dev extra: pip install 'ampscope[dev]'")

from playwright.sync_api import Page, expect

from tests.integration.browser.driver import goto, serve, settle
from tests.integration.browser.watched import Watched
from tests.support.verdicts.growing import growing

pytestmark = pytest.mark.browser

#: The map's rows: a module, and the two in it.
_MODULES = ["blocks", "1", "0"]


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory, browser: object) -> Iterator[str]:
    """Where the app is served on a run in which ``blocks.1`` grows."""
    folder: Path = tmp_path_factory.mktemp("grown")
    growing(folder / "grown").close()
    with serve(folder) as address:
        yield address


def close_up(page: Page, words: str) -> None:
    """Wait until a place is close up."""
    expect(page.get_by_text(words, exact=False).first).to_be_visible()
    settle(page)


def test_a_click_on_a_cell_shows_its_place_and_the_address_keeps_it(watched: Watched, grown: str) -> None:
    page = watched.page
    goto(page, grown, "ranges", run="grown")
    expect(page.locator(".name")).to_have_text(_MODULES)
    close_up(page, "add in blocks.1, forward, float16")
    expect(page.locator(".key")).to_contain_text("shown close up below")
    cells = page.locator(".cells").nth(2)
    cells.hover(position={"x": 5, "y": 8})
    expect(page.locator(".tip b")).to_have_text("blocks.0")
    expect(page.locator(".tip")).to_contain_text("bits of headroom: mm, forward, float16")
    expect(page.locator(".tip path")).to_have_count(3)
    cells.click(position={"x": 5, "y": 8})
    close_up(page, "mm in blocks.0, forward, float16")
    expect(page).to_have_url(re.compile(r"place=[0-9a-f]{12}.*step=0(&|$)"))
    page.reload()
    page.wait_for_selector(".cells")
    close_up(page, "mm in blocks.0, forward, float16")
    page.get_by_text("Replay step 0 at this op").click()
    expect(page.get_by_role("heading", name="Replay", exact=True)).to_be_visible()
    page.go_back()
    close_up(page, "mm in blocks.0, forward, float16")
    assert watched.complaints == []


def test_the_keyboard_goes_from_cell_to_cell(watched: Watched, grown: str) -> None:
    page = watched.page
    goto(page, grown, "ranges", run="grown")
    page.locator(".map").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
    expect(page.locator(".tip")).to_contain_text("step 190")
    expect(page.locator(".tip b")).to_have_text("blocks.0")
    page.keyboard.press("Enter")
    close_up(page, "mm in blocks.0, forward, float16")
    expect(page).to_have_url(re.compile(r"step=190(&|$)"))
    assert watched.complaints == []


def test_a_cell_on_the_overview_leads_to_its_place(watched: Watched, grown: str) -> None:
    page = watched.page
    page.set_viewport_size({"width": 1280, "height": 1800})
    goto(page, grown, "", run="grown")
    page.locator(".name", has_text="blocks.1").click()
    expect(page.get_by_role("heading", name="Ranges", exact=True)).to_be_visible()
    close_up(page, "add in blocks.1, forward, float16")
    page.go_back()
    expect(page.get_by_role("heading", name="Overview", exact=True)).to_be_visible()
    settle(page)
    expect(page.get_by_role("heading", name="Overview", exact=True)).to_be_visible()  # the click was for once
    assert watched.complaints == []


def test_a_place_of_the_table_is_shown_close_up(watched: Watched, grown: str) -> None:
    page = watched.page
    goto(page, grown, "ranges", run="grown")
    table = page.get_by_role("table", name="Closest to overflow")
    table.get_by_role("button", name="mm in blocks.0").first.click()
    close_up(page, "mm in blocks.0, forward, float16")
    assert watched.complaints == []


def test_boxes_wrap_in_a_narrow_window_and_leave_their_words_whole(watched: Watched, grown: str) -> None:
    page = watched.page
    page.set_viewport_size({"width": 1000, "height": 900})
    goto(page, grown, "ranges", run="grown")
    close_up(page, "add in blocks.1, forward, float16")
    boxes = page.locator("[data-testid=stMain] [data-testid=stSelectbox]:not(.st-key-amp-bar *)")
    assert boxes.count() >= 3
    room = boxes.evaluate_all(
        "all => all.flatMap(each => [...each.querySelectorAll('input')])"
        ".map(one => one.value ? one.clientWidth - one.scrollWidth : 99)"
    )
    assert len(room) >= 3
    assert min(room) >= 0
