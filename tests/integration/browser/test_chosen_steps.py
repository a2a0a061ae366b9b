"""Runs and steps chosen on Compare and on Precision, and the ways from there into Replay and back."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("playwright", reason="needs the dev extra: pip install 'ampscope[dev]'")

from playwright.sync_api import expect

from tests.integration.browser.driver import goto, settle
from tests.integration.browser.watched import Watched

pytestmark = pytest.mark.browser


def test_another_run_is_chosen_and_the_page_says_how_the_two_differ(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "compare", run="attention-overflow", b="log-zero")
    expect(page.locator(".amp-card")).to_contain_text("Different")
    box = page.get_by_test_id("stSelectbox").filter(has=page.get_by_text("B", exact=True)).locator("input")
    box.fill("clip")
    box.press("Enter")
    settle(page)
    expect(page).to_have_url(re.compile(r"[?&]b=clip-before-unscale(&|$)"))
    expect(page.locator(".amp-card")).to_contain_text("clip-before-unscale")
    assert page.locator("[data-testid=stException]").count() == 0
    pieces = page.locator(".amp-data td wbr").evaluate_all("all => all.map(one => one.nextSibling.textContent)")
    assert pieces
    assert not [piece for piece in pieces if re.match(r"[\d\s]", piece)]  # a number is not broken at its point
    assert watched.complaints == []


def test_it_leads_to_where_two_steps_part_and_back_again(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "compare", run="attention-overflow", b="attention-overflow")
    page.get_by_test_id("stPageLink").filter(has_text="Replay A").click()
    page.get_by_role("heading", name="Replay", exact=True).wait_for()
    settle(page)
    expect(page).to_have_url(re.compile(r"[?&]against="))
    expect(page.get_by_text("the first op whose values differ").first).to_be_visible()
    page.go_back()
    page.get_by_role("heading", name="Compare", exact=True).wait_for()
    settle(page)
    expect(page.locator(".amp-card")).to_contain_text("These two steps, op by op")
    assert watched.complaints == []


def test_a_click_on_a_column_shows_its_step(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "precision", run="attention-overflow")
    before = page.url
    page.locator(".js-plotly-plot .bars path").first.click(force=True)
    expect(page).not_to_have_url(before)
    settle(page)
    step = re.search(r"[?&]step=(\d+)", page.url)
    assert step is not None
    box = page.get_by_test_id("stSelectbox").filter(has=page.get_by_text("Traced step", exact=True)).locator("input")
    expect(box).to_have_value(re.compile(rf"^Step {int(step[1]):,}, "))
    assert watched.complaints == []


def test_a_row_leads_to_its_first_op_and_back_again(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "precision", run="attention-overflow")
    row = page.get_by_role("link", name="aten.bmm.default", exact=True).first
    asked = re.search(r"op=(\d+)", row.get_attribute("href") or "")
    assert asked is not None
    row.click()
    page.get_by_role("heading", name="Replay", exact=True).wait_for()
    settle(page)
    expect(page).to_have_url(re.compile(rf"[?&]op={asked[1]}(&|$)"))
    page.go_back()
    page.get_by_role("heading", name="Precision", exact=True).wait_for()
    settle(page)
    assert page.locator("[data-testid=stException]").count() == 0
    assert watched.complaints == []
