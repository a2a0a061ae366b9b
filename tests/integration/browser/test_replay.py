from __future__ import annotations

import re
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("playwright", reason="needs the dev extra: pip install 'ampscope[dev]'")

from playwright.sync_api import Page, expect

from tests.integration.browser.driver import goto, settle
from tests.integration.browser.watched import Watched

pytestmark = pytest.mark.browser

#: A sample whose incident is an overflow in attention.
RUN = "attention-overflow"


def asked(page: Page) -> dict[str, str]:
    """What the page's address says."""
    return {name: values[0] for name, values in parse_qs(urlsplit(page.url).query).items()}


def at(page: Page, op: int) -> None:
    """Wait until the cursor is at the op, and the address says so."""
    expect(page.locator(".amp-card .amp-place").first).to_have_text(f"op number {op:,}")
    expect(page).to_have_url(re.compile(rf"[?&]op={op}(&|$)"))


def test_keys_lists_and_the_track_move_the_cursor_without_a_complaint(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "replay", run=RUN, op="0")
    at(page, 0)
    page.keyboard.press("ArrowRight")
    at(page, 1)
    page.keyboard.press("n")
    at(page, 18)
    page.locator(".line", has_text="masked_fill").first.click()
    at(page, 20)
    page.keyboard.press("Home")
    at(page, 0)
    page.locator(".js-plotly-plot").first.scroll_into_view_if_needed()
    box = page.locator(".js-plotly-plot").first.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] - 30, box["y"] + 100)
    expect(page.locator(".amp-card .amp-place").first).to_have_text(re.compile(r"op number 2\d\d"))
    line = page.locator(".amp-cursor").bounding_box()
    assert line is not None
    assert line["x"] == pytest.approx(box["x"] + box["width"] - 30, abs=6)
    assert watched.complaints == []


def test_playing_runs_to_where_nan_begins_and_a_reload_finds_the_place_again(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "replay", run=RUN, op="8")
    page.get_by_text("fast", exact=True).click()
    settle(page)
    page.keyboard.press("p")
    at(page, 18)
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    page.reload()
    page.wait_for_selector(".amp-card")
    settle(page)
    at(page, 18)
    assert watched.complaints == []


def test_keys_work_right_after_a_choice(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "replay", run=RUN, op="0")
    page.get_by_label("Compare with").click()
    page.get_by_role("option").nth(1).click()
    expect(page).to_have_url(re.compile("against="))
    settle(page)
    page.keyboard.press("n")
    at(page, 18)
    assert "against" in asked(page)
    assert watched.complaints == []


def test_back_leads_to_the_page_before(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "", run=RUN)
    for link, title in (("Look at it closely", "Incident"), ("Replay the step from its origin", "Replay")):
        page.get_by_text(link).click()
        expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
        settle(page)
    for title in ("Incident", "Overview"):
        page.go_back()
        expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
        settle(page)
    assert watched.complaints == []


def test_links_lead_from_the_card_to_the_op_and_on_and_back(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "", run=RUN)
    page.get_by_text("Look at it closely").click()
    expect(page.get_by_role("heading", name="Incident", exact=True)).to_be_visible()
    settle(page)
    page.get_by_text("Replay the step from its origin").click()
    expect(page).to_have_url(re.compile(r"/replay\?.*op="))
    at(page, int(asked(page)["op"]))
    expect(page.get_by_text("NaN or infinity begins here")).to_be_visible()
    module = page.locator(".amp-facts div").first.inner_text().split(" (")[0]
    page.get_by_text("Precision of this module").click()
    expect(page.get_by_text(f"only {module} and what is in it")).to_be_visible()
    page.get_by_text("Replay from its first op").click()
    expect(page.get_by_role("heading", name="Replay", exact=True)).to_be_visible()
    settle(page)
    step = asked(page)["step"]
    page.get_by_text("Loss scale at this step").click()
    expect(page.get_by_text(f"At step {step}")).to_be_visible()
    settle(page)
    page.get_by_text("The incident", exact=True).click()
    expect(page.get_by_role("heading", name="Incident", exact=True)).to_be_visible()
    settle(page)
    assert asked(page)["run"] == RUN
    assert watched.complaints == []


def test_a_line_of_a_hostile_list_is_text(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "replay", run="hostile")
    assert page.locator(".line").count() > 2
    assert page.locator(".list b b, .list script, .list a").count() == 0
    page.locator(".line").nth(1).click()
    settle(page)
    assert page.locator("[data-testid=stException]").count() == 0
    assert watched.complaints == []
