"""The search that opens with Ctrl-K, by keyboard alone."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("playwright", reason="needs the dev extra: pip install 'ampscope[dev]'")

from playwright.sync_api import Page, expect

from tests.integration.browser.driver import goto, settle
from tests.integration.browser.watched import Watched

pytestmark = pytest.mark.browser


def searched(page: Page, text: str) -> None:
    page.keyboard.press("Control+k")
    expect(page.get_by_role("combobox", name="Modules, ops")).to_be_focused()
    page.keyboard.type(text)


def test_a_search_gives_groups_with_what_was_searched_marked_and_leads_there(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "scale", run="overflow")
    searched(page, "softmax")
    offers = page.get_by_role("option")
    expect(offers.last).to_contain_text("aten._softmax.default")
    assert page.locator("dialog .title span:first-child").all_inner_texts() == ["Modules", "Lines", "Ops"]
    assert set(page.locator("dialog mark").all_inner_texts()) == {"softmax"}
    page.keyboard.press("ArrowUp")  # from the first to the last
    expect(offers.last).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Replay", exact=True)).to_be_visible()
    settle(page)
    assert re.search(r"run=overflow.*step=260.*op=4", page.url)
    expect(page.locator(".amp-card .amp-title").first).to_contain_text("aten._softmax.default")
    page.keyboard.press("Control+k")
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_be_hidden()
    assert watched.complaints == []


def test_enter_waits_for_what_was_typed(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "", run="overflow")
    searched(page, "step 264")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="At step 264")).to_be_visible()  # its ops were not kept
    settle(page)
    assert "/scale?" in page.url
    assert watched.complaints == []


def test_commands_save_the_report_and_change_the_theme(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "scale", run="overflow")
    with page.expect_download() as saved:
        searched(page, "report")
        page.keyboard.press("Enter")
    assert saved.value.suggested_filename == "report.html"
    searched(page, "theme dark")
    expect(page.get_by_role("option")).to_have_count(1)
    page.keyboard.press("Enter")
    page.wait_for_function("getComputedStyle(document.querySelector('.stApp') ?? document.body).colorScheme === 'dark'")
    assert watched.complaints == []
