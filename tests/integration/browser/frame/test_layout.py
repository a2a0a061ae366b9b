"""Nothing on a page moves while it opens, and no page is wider than its window."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("playwright", reason="needs the dev extra: pip install 'ampscope[dev]'")

from playwright.sync_api import Browser, Page

from tests.integration.browser.driver import PAGES, each_tab, goto, settle

pytestmark = [pytest.mark.browser, pytest.mark.slow]

#: Of a desk, a narrow window and a telephone, pixels.
WIDTHS = (1400, 900, 480)
#: Has the browser tell what moves, from the first frame on, in a window of its own.
WATCH = """
window.moved = [];
const told = ({ value, sources }) => [value, ...sources.map(({ node }) => node?.outerHTML?.slice(0, 160))];
new PerformanceObserver((list) => list.getEntries().forEach((entry) => window.moved.push(told(entry))))
  .observe({ type: "layout-shift", buffered: true });
"""
#: Lets a page wait for its pieces as long as it takes: how soon a busy machine has them is not what is asked here.
PATIENT = """{
  const frame = window.requestAnimationFrame.bind(window);
  const begun = performance.now();
  const opens = () => document.documentElement.dataset.opening === "";
  window.requestAnimationFrame = (then) => frame((now) => then(opens() ? begun : now));
}"""
#: Layout shift of a page, as browsers add it up: none where the machine is quiet; up to 0.1 counts as good.
MOVED = 0.1
#: How far the page, or what scrolls it, is wider than what is shown of it.
TOO_WIDE = """() => [document.scrollingElement, document.querySelector("[data-testid=stMain]")]
  .map((one) => one.scrollWidth - one.clientWidth)"""

#: How far words stand from where the element begins.
INDENTED = "all => all.map(one => getComputedStyle(one).paddingLeft)"
#: Of names in a tree of modules, the pixels that are left for each beside its indentation.
ROOM = "all => all.map(one => one.clientWidth - parseFloat(getComputedStyle(one).paddingLeft))"


def opened(browser: Browser, address: str, width: int, place: str, run: str) -> Page:
    """A page in a window of its own, of which nothing is kept from before."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.add_init_script(WATCH + PATIENT)
    goto(page, address, place, run=run)
    return page


def test_what_moves_would_be_seen(browser: Browser) -> None:
    page = browser.new_page()
    page.add_init_script(WATCH)
    page.goto("data:text/html,<p>here</p>")
    page.evaluate("document.body.prepend(Object.assign(document.createElement('div'), { style: 'height: 300px' }))")
    page.wait_for_function("window.moved.length > 0")
    page.close()


#: Pages that a telephone opens by itself, from a link in a message: the overview, and the incident that it tells of.
LINKED = ("", "incident")


@pytest.mark.parametrize("place", PAGES)
def test_nothing_moves_while_a_page_opens(browser: Browser, address: str, place: str) -> None:
    for width in (max(WIDTHS), min(WIDTHS)) if place in LINKED else (max(WIDTHS),):
        page = opened(browser, address, width, place, "attention-overflow")
        moved: list[list[Any]] = page.evaluate("window.moved")
        page.close()
        assert sum(value for value, *_ in moved) <= MOVED, (width, moved)


@pytest.mark.parametrize("place", PAGES)
def test_no_page_scrolls_sideways(browser: Browser, address: str, place: str) -> None:
    page = opened(browser, address, max(WIDTHS), place, "attention-overflow")
    for run, widths in (("attention-overflow", WIDTHS[1:]), ("ranks", WIDTHS[-1:])):  # what fits those fits a desk
        goto(page, address, place, run=run)
        for tab in each_tab(page):
            for width in widths:
                page.set_viewport_size({"width": width, "height": 900})
                settle(page)
                assert page.evaluate(TOO_WIDE) == [0, 0], (run, tab, width)
    page.close()


def test_the_curves_stand_below_the_verdict_with_no_gap_to_speak_of(browser: Browser, address: str) -> None:
    page = opened(browser, address, max(WIDTHS), "compare", "attention-overflow")
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        goto(page, address, "compare", run="sample_logs/healthy", b="clip-before-unscale")
        links = page.get_by_test_id("stPageLink").filter(has_text="Replay A").bounding_box()
        curves = page.get_by_role("heading", name="Curves").bounding_box()
        assert links is not None
        assert curves is not None
        assert 0 <= curves["y"] - links["y"] - links["height"] <= 160, width
    page.close()


def test_tables_fit_a_desk_and_a_telephone(browser: Browser, address: str) -> None:
    page = opened(browser, address, max(WIDTHS), "runs", "attention-overflow")
    shown = (
        ("runs", "ranks"),
        ("ranges", "attention-overflow"),
        ("ranks", "ranks"),
        ("precision", "attention-overflow"),
    )
    for place, run in (*shown, ("incident", "attention-overflow"), ("scale", "attention-overflow")):
        for width in (max(WIDTHS), min(WIDTHS)):
            page.set_viewport_size({"width": width, "height": 900})
            goto(page, address, place, run=run, search="attention")  # of runs, those with names that people give
            page.wait_for_selector(".amp-data tbody tr")
            for tab in each_tab(page):
                over = page.locator(".amp-data .amp-scroll").evaluate_all(
                    "all => all.map(one => one.scrollWidth - one.clientWidth)"
                )
                assert max(over, default=0) <= 0, (place, tab, width, over)
    page.close()


def test_narrow_windows_have_room_for_heads_names_and_code(browser: Browser, address: str) -> None:
    page = opened(browser, address, 900, "ranks", "ranks")
    scroll = page.locator(".amp-data .amp-scroll").last
    assert scroll.evaluate("one => one.scrollWidth - one.clientWidth") == 0
    page.set_viewport_size({"width": min(WIDTHS), "height": 900})
    goto(page, address, "ranges", run="clip-before-unscale")
    page.locator(".map .name").first.wait_for()
    names = page.locator(".map .name").evaluate_all(ROOM)
    assert min(names) >= 60
    page.locator(".amp-data tbody tr").first.wait_for()
    cells = page.locator(".amp-data tbody tr").first.locator("td").evaluate_all(INDENTED)
    assert set(cells) == {"0px"}  # of a row as a list
    goto(page, address, "plan", run="attention-overflow")
    code = page.locator("[data-testid=stCode] pre").evaluate_all(
        "all => all.map(one => one.scrollWidth - one.clientWidth)"
    )
    assert code
    assert max(code) <= 0  # so that the button that copies lies beside it
    page.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_all_buttons_and_words_of_the_track_are_in_sight(browser: Browser, address: str, width: int) -> None:
    page = opened(browser, address, width, "replay", "attention-overflow")
    bar = page.locator(".st-key-replay-track .bar")
    for part in (bar, page.locator(".st-key-replay-track .told"), page.locator(".st-key-replay-track .key")):
        assert part.evaluate("one => [one.scrollWidth - one.clientWidth, one.scrollHeight - one.clientHeight]") == [
            0,
            0,
        ]
    foot = page.get_by_role("button", name="SVG").first.bounding_box()
    key = page.locator(".st-key-replay-track .key").bounding_box()
    assert foot is not None
    assert key is not None
    assert key["y"] + key["height"] <= foot["y"]
    page.close()
