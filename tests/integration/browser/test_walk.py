from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs the dev extra: pip install 'ampscope[dev]'")

from playwright.sync_api import expect

from tests.integration.browser.driver import PAGES, each_tab, goto, serve, settle, walk
from tests.integration.browser.watched import Watched
from tests.support.scenes import overflow
from tests.support.trace_builder import TraceBuilder

pytestmark = pytest.mark.browser


#: The samples are on offer beside the scenes; a name that both have is told by its folder.
SAMPLES = ("attention-overflow", "sample_logs/healthy")


@pytest.mark.parametrize("run", [*SAMPLES, "hostile", "empty", "no_manifest", "torn"])
def test_every_page_is_drawn_without_a_complaint(watched: Watched, address: str, run: str) -> None:
    goto(watched.page, address, "", run=run)
    for place in walk(watched.page):
        for tab in each_tab(watched.page):
            assert watched.page.locator("[data-testid=stException]").count() == 0, (place, tab)
    expect(watched.page).to_have_url(re.compile(rf"[?&]run={re.escape(run.replace('/', '%2F'))}(&|$)"))
    assert watched.complaints == []
    assert watched.hosts <= {"localhost", None}


def test_the_browsers_tab_says_how_the_run_is_while_pages_are_drawn(watched: Watched, address: str) -> None:
    goto(watched.page, address, "", run="overflow")
    watched.page.evaluate(
        "() => { window.titles = [document.title]; new MutationObserver(() => window.titles.push(document.title))"
        ".observe(document.head, { subtree: true, childList: true, characterData: true }) }"
    )
    for _ in walk(watched.page):
        pass
    told = set(watched.page.evaluate("window.titles"))
    assert len(told) > 1  # Runs and Wall say no verdict
    assert all(title.endswith("overflow - AMPscope") for title in told), told


def test_an_empty_folder_says_how_to_make_a_run(watched: Watched, tmp_path: Path) -> None:
    with serve(tmp_path) as address:
        goto(watched.page, address, "")
        expect(watched.page.get_by_text("there is no run of yours in")).to_be_visible()
        goto(watched.page, address, "runs")
        assert watched.page.locator("[data-testid=stException]").count() == 0
    assert watched.complaints == []


@pytest.mark.parametrize("place", PAGES)
def test_hostile_names_stay_text_and_nothing_runs_off_the_page(watched: Watched, address: str, place: str) -> None:
    page = watched.page
    goto(page, address, place, run="hostile")
    main = page.locator("[data-testid=stMain]")
    for tab in each_tab(page):
        assert page.locator("a[href*='example.com']").count() == 0
        assert page.get_by_text("bold", exact=True).count() == 0
        assert page.locator(".katex").count() == 0
        for width in (1280, 480):
            page.set_viewport_size({"width": width, "height": 900})
            settle(page)
            assert main.evaluate("one => one.scrollWidth - one.clientWidth") <= 1, (tab, width)
    assert watched.complaints == []


def test_no_address_opens_what_is_not_on_offer(watched: Watched, tmp_path: Path) -> None:
    secret = TraceBuilder(tmp_path / "secret", model="SecretModel").close()
    shown = tmp_path / "shown"
    TraceBuilder(shown / "mine").close()
    (shown / "link").symlink_to(secret)
    with serve(shown) as address:
        for asked in (str(secret), "../secret", "link", "mine/../../secret", "%2e%2e/secret"):
            goto(watched.page, address, "", run=asked)
            expect(watched.page.get_by_text("there is no")).to_be_visible()
            assert "SecretModel" not in watched.page.content(), asked
    assert watched.complaints == []


def test_links_lead_from_the_verdict_to_the_incident_and_keep_the_run(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "", run="finding")
    page.get_by_text("Look at it closely").click()
    expect(page.get_by_role("heading", name="Incident")).to_be_visible()
    settle(page)
    assert "run=finding" in page.url
    assert "incident=" in page.url


def test_a_narrow_window_folds_the_side_bar_once_a_page_was_chosen(watched: Watched, address: str) -> None:
    page = watched.page
    page.set_viewport_size({"width": 480, "height": 900})
    goto(page, address, "", run="overflow")
    page.get_by_test_id("stExpandSidebarButton").click()
    page.locator("[data-testid=stSidebar] [data-testid=stPageLink-NavLink]").filter(has_text="Usage").click()
    expect(page.get_by_role("heading", name="Usage", exact=True)).to_be_visible()
    expect(page.get_by_test_id("stExpandSidebarButton")).to_be_visible()
    assert watched.complaints == []


@pytest.mark.parametrize("runs", [("run",), ("run", "other")])
def test_one_back_leaves_a_page(watched: Watched, tmp_path: Path, runs: tuple[str, ...]) -> None:
    for name in runs:
        overflow(tmp_path / name).close()
    page = watched.page
    with serve(tmp_path) as address:
        goto(page, address, "")
        for name in ("Precision", "Plan", "Replay"):
            page.locator("[data-testid=stSidebar] [data-testid=stPageLink-NavLink]").filter(has_text=name).click()
            page.get_by_role("heading", name=name, exact=True).wait_for()
            settle(page)
        for name in ("Plan", "Precision", "Overview"):
            page.go_back()
            page.get_by_role("heading", name=name, exact=True).wait_for()
            settle(page)
    assert watched.complaints == []


def test_the_run_that_was_chosen_stays_chosen_from_page_to_page(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "", run="overflow")
    page.locator("[data-testid=stSidebar] [data-testid=stPageLink-NavLink]").filter(has_text="Scale").click()
    expect(page.get_by_role("heading", name="Scale", exact=True)).to_be_visible()
    settle(page)
    expect(page.locator(".st-key-run input")).to_have_value("overflow")
    assert "run=overflow" in page.url


def test_the_first_page_is_found_by_its_name_too(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "overview", run="overflow")
    expect(page.get_by_role("heading", name="Overview", exact=True)).to_be_visible()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page).to_have_url(re.compile(rf"^{address}/\?run=overflow(&|$)"))
    assert watched.complaints == []


def test_a_run_is_opened_from_the_list(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "runs", run="empty", search="H200")
    page.get_by_role("button", name="Steps", exact=True).click()
    expect(page.get_by_role("columnheader", name="Steps")).to_have_attribute("aria-sort", "ascending")
    expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()
    page.locator(".amp-data tbody a").first.click()
    expect(page.get_by_role("heading", name="Overview", exact=True)).to_be_visible()
    settle(page)
    assert "run=empty" not in page.url
    expect(page.locator(".amp-card")).to_be_visible(timeout=30_000)
    page.locator("[data-testid=stSidebar] [data-testid=stPageLink-NavLink]").filter(has_text="Runs").click()
    expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()
    settle(page)
    expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()  # the choice was for once


#: Lets a page's latest message to the server be sent once more.
_KEEP_SENT = """{
  const send = WebSocket.prototype.send;
  WebSocket.prototype.send = function (message) {
    window.sendAgain = () => send.call(this, message);
    return send.call(this, message);
  };
}"""


def test_a_late_answer_to_the_page_before_leaves_the_page_there(watched: Watched, address: str) -> None:
    """Streamlit takes the page's elements away when a part that another page has asked for is drawn."""
    page = watched.page
    page.add_init_script(_KEEP_SENT)
    goto(page, address, "scale", run="overflow")
    page.keyboard.press("Control+k")
    page.keyboard.type("softmax")
    expect(page.get_by_role("option").last).to_contain_text("softmax")  # the server has answered
    page.evaluate("window.late = window.sendAgain")
    page.keyboard.press("Escape")
    page.locator("[data-testid=stSidebar] [data-testid=stPageLink-NavLink]").filter(has_text="Overview").click()
    card = page.locator("[data-testid=stMain] .amp-card").first
    expect(card).to_be_visible()
    settle(page)
    page.evaluate("window.late()")
    expect(card).to_be_hidden()
    expect(card).to_be_visible()
    assert watched.complaints == []


def test_a_mark_on_the_time_line_leads_to_what_it_stands_for(watched: Watched, address: str) -> None:
    page = watched.page
    page.set_viewport_size({"width": 1280, "height": 1800})
    marks = page.locator(".js-plotly-plot .scatterlayer path.point")
    goto(page, address, "", run="attention-overflow")
    marks.nth(marks.count() - 4).click(force=True)  # a skipped step; after it come two harmless events and the problem
    expect(page.get_by_role("heading", name="Scale", exact=True)).to_be_visible()
    expect(page.get_by_text(re.compile(r"^At step \d+$"))).to_be_visible()
    for run in ("attention-overflow", "finding"):  # with and without a scaler
        goto(page, address, "", run=run)
        marks.last.click(force=True)
        expect(page.get_by_role("heading", name="Incident", exact=True)).to_be_visible()
    assert watched.complaints == []


def test_a_zoom_chooses_the_steps_that_every_page_shows(watched: Watched, address: str) -> None:
    page = watched.page
    page.set_viewport_size({"width": 1280, "height": 1800})
    goto(page, address, "", run="attention-overflow")
    box = page.locator(".st-key-timeline .js-plotly-plot").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 400, box["y"] + 60)
    expect(page.locator(".amp-cross")).to_contain_text("loss scale")
    page.mouse.down()
    page.mouse.move(box["x"] + 600, box["y"] + 65, steps=4)
    page.mouse.up()
    expect(page.get_by_text(re.compile(r"^Steps \d+ to \d+$"))).to_be_visible()
    shown = re.search(r"range=\d+-\d+", page.url)
    assert shown
    with page.expect_download() as download:
        page.get_by_role("button", name="SVG").click()
    assert download.value.suggested_filename == "attention-overflow-timeline.svg"
    page.locator("[data-testid=stSidebar] [data-testid=stPageLink-NavLink]").filter(has_text="Scale").click()
    expect(page.get_by_role("heading", name="Scale", exact=True)).to_be_visible()
    expect(page.get_by_text(re.compile(r"^Steps \d+ to \d+$"))).to_be_visible()
    page.get_by_role("button", name="Whole run").click()
    expect(page.get_by_role("button", name="Whole run")).to_have_count(0)
    settle(page)
    assert "range=" not in page.url
    assert watched.complaints == []
