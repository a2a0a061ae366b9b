from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("playwright", reason="needs the dev extra: pip install 'ampscope[dev]'")

from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from tests.app.scenes import SCENES
from tests.browser.driver import PAGES, goto, serve, settle
from tests.builder import TraceBuilder

pytestmark = pytest.mark.browser

#: Streamlit looks for its own server below a page's address first, and Chromium reports that it is not there.
_PROBED = "/_stcore/"


class Watched:
    """A page, with everything that it complained about or asked the network for."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.hosts: set[str | None] = set()
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).hostname))

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type == "error" and _PROBED not in message.location["url"]:
            self.complaints.append(message.text)


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    yield Watched(page)
    page.close()


@pytest.mark.parametrize("scene", [*SCENES, "no_manifest", "torn"])
def test_every_page_is_drawn_without_a_complaint(watched: Watched, address: str, scene: str):
    for place in PAGES:
        goto(watched.page, address, place, run=scene)
        assert watched.page.locator("[data-testid=stException]").count() == 0
    assert watched.complaints == []
    assert watched.hosts <= {"localhost", None}


@pytest.mark.parametrize("width", [1280, 480])
@pytest.mark.parametrize("place", PAGES)
def test_hostile_names_stay_text_and_nothing_runs_off_the_page(watched: Watched, address: str, place: str, width: int):
    page = watched.page
    page.set_viewport_size({"width": width, "height": 900})
    goto(page, address, place, run="hostile")
    assert page.locator("a[href*='example.com']").count() == 0
    assert page.get_by_text("bold", exact=True).count() == 0
    assert page.locator(".katex").count() == 0
    main = page.locator("[data-testid=stMain]")
    assert main.evaluate("one => one.scrollWidth - one.clientWidth") <= 1
    assert watched.complaints == []


def test_links_lead_from_the_verdict_to_the_incident_and_keep_the_run(watched: Watched, address: str):
    page = watched.page
    goto(page, address, "", run="finding")
    page.get_by_text("Look at it closely").click()
    expect(page.get_by_role("heading", name="Incident")).to_be_visible()
    settle(page)
    assert "run=finding" in page.url
    assert "incident=" in page.url


def test_the_run_that_was_chosen_stays_chosen_from_page_to_page(watched: Watched, address: str):
    page = watched.page
    goto(page, address, "", run="overflow")
    page.get_by_test_id("stSidebarNavLink").filter(has_text="Scale").click()
    expect(page.get_by_role("heading", name="Scale", exact=True)).to_be_visible()
    settle(page)
    expect(page.get_by_text("Run: overflow")).to_be_visible()
    assert "run=overflow" in page.url


def test_a_page_left_open_notices_new_rows(watched: Watched, tmp_path: Path):
    trace = TraceBuilder(tmp_path / "live")
    trace.step()
    trace.leave_open()
    with serve(tmp_path) as address:
        goto(watched.page, address, "", run="live")
        expect(watched.page.get_by_text("Being written now")).to_be_visible()
        trace.step()
        trace.leave_open()
        expect(watched.page.get_by_text("There are newer rows.")).to_be_visible(timeout=15_000)
        watched.page.get_by_role("button", name="Show the newest").click()
        expect(watched.page.locator(".amp-tile").first).to_contain_text("2")
    trace.close()
