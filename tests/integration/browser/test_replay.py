from __future__ import annotations

import re
from collections.abc import Callable
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


#: Where lanes of the track are, pixels below its upper edge.
MODULES, OPS = 36, 105


def place_of(page: Page, part: float, lane: int) -> tuple[float, float]:
    """A point on the track: so far along it, in this lane."""
    box = page.locator(".figure").bounding_box()
    assert box is not None
    gutter = 74
    return box["x"] + gutter + part * (box["width"] - gutter), box["y"] + lane


def brushed(page: Page, act: Callable[[], object]) -> tuple[float, float]:
    """Where the part of the step begins that is on screen after ``act``, and how much of the step it is; shares."""
    brush = page.locator(".brush")
    before = brush.get_attribute("style") or ""
    act()
    expect(brush).not_to_have_attribute("style", before)
    left, width = brush.evaluate("one => [one.style.left, one.style.width]")
    return float(left.rstrip("%")) / 100, float(width.rstrip("%")) / 100


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
    page.mouse.click(*place_of(page, 240 / 250, OPS))
    expect(page.locator(".amp-card .amp-place").first).to_have_text(re.compile(r"op number 2\d\d"))
    expect(page.locator(".track .said")).to_have_text(re.compile(r"number 2\d\d:"))
    assert watched.complaints == []


def test_the_track_zooms_pans_and_names_what_is_under_the_pointer(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "replay", run=RUN, op="18")
    at(page, 18)
    left, width = brushed(page, lambda: page.keyboard.press("w"))
    assert left <= 18 / 225 < left + width < 0.8  # closer, around the chosen op
    middle = (round((left + width / 2) * 225) + 0.5) / 225  # of an op: what is under the pointer is not at its edge
    page.mouse.move(*place_of(page, (middle - left) / width, OPS))
    tip = page.locator(".tip")
    expect(tip).to_have_text(re.compile(r"^\d+: .*(float16|float32)"))
    under = tip.inner_text()
    closer = brushed(page, lambda: page.mouse.wheel(0, -400))
    assert closer[1] < width
    expect(tip).to_have_text(under)  # what the wheel zooms at stays where it was
    page.mouse.down()
    moved = brushed(page, lambda: page.mouse.move(*place_of(page, 0.113, OPS), steps=4))
    page.mouse.up()
    assert moved[0] == pytest.approx(closer[0] + 0.4 * closer[1], abs=0.01)
    at(page, 18)  # dragging chose nothing
    assert brushed(page, lambda: page.keyboard.press("0")) == (0, 1)
    page.mouse.move(*place_of(page, 0.3, MODULES))
    expect(tip).to_have_text(re.compile(r"^blocks: \d+ ops$"))
    assert watched.complaints == []


def test_forward_and_backward_lead_to_each_other_and_the_card_to_its_inputs(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "replay", run=RUN, op="18")
    page.keyboard.press("b")
    expect(page.locator(".amp-facts")).to_contain_text("backward, in BmmBackward0")
    page.keyboard.press("b")  # while the page is still at work on the first: the address must say the last
    at(page, 18)
    page.keyboard.press("ArrowLeft")
    at(page, 17)
    page.keyboard.press("p")
    at(page, 18)
    moved = page.get_by_role("group", name="Ops that it read from").get_by_role("link").first
    with page.context.expect_page() as opened:
        moved.click(modifiers=["ControlOrMeta"])
    assert "op=18" not in opened.value.url
    opened.value.close()
    number = int(moved.locator(".lead").inner_text().replace(",", ""))
    moved.click()
    at(page, number)
    expect(page.locator(".track .said")).to_have_text(re.compile(rf"number {number}:"))
    assert watched.complaints == []


def test_playing_runs_to_where_nan_begins_and_a_reload_finds_the_place_again(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "replay", run=RUN, op="8")
    page.get_by_label("Speed of playing").select_option("fast")
    page.keyboard.press("Space")
    at(page, 18)
    expect(page.get_by_role("button", name="Play", exact=True)).to_be_visible()
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
    expect(page.locator(".told")).to_contain_text("NaN or infinity begins here, the other step: ")
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
    expect(page.get_by_text("NaN or infinity begins here", exact=True)).to_be_visible()
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
    assert page.locator(".line b b, .line script, .line a").count() == 0
    page.locator(".line").nth(1).click()
    settle(page)
    assert page.locator("[data-testid=stException]").count() == 0
    assert watched.complaints == []
