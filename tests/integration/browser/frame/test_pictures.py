"""Every figure is saved as a picture that opens elsewhere and can be read by itself."""

from __future__ import annotations

import re
import xml.etree.ElementTree as Xml
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs the dev extra: pip install 'ampscope[dev]'")

from playwright.sync_api import Page, expect

from tests.integration.browser.driver import goto, settle
from tests.integration.browser.watched import Watched

pytestmark = pytest.mark.browser

_SVG = "{http://www.w3.org/2000/svg}"
#: Of each page: a run with every figure that it has, the tab that they are behind, and words that are in them.
FIGURES = (
    ("", "attention-overflow", None, {"Time line": ("optimizer step", "loss scale")}),
    ("ranks", "ranks", None, {"Rank by step": ("optimizer step", "rank 0")}),
    ("incident", "attention-overflow", "The path", {"The path of the value": ("forward", "bmm", "origin")}),
    ("incident", "attention-overflow", "Evidence", {"Magnitudes against": ("overflows", "output 0")}),
    ("replay", "attention-overflow", None, {"Step 294": ("forward", "NaN or inf", "dtype"), "What op": ("overflows",)}),
    ("precision", "attention-overflow", None, {"Dtypes by traced": ("float16",), "Dtypes by module": ("share of",)}),
    ("ranges", "attention-overflow", None, {"Modules by": ("overflowed",), "bmm in blocks.0.attention": ("step",)}),
    ("plan", "attention-overflow", None, {"What each": ("bfloat16",), "Loss scales": ("the scale used",)}),
    ("compare", "attention-overflow", None, {"Two runs": ("loss", "A: attention-overflow")}),
    ("scale", "attention-overflow", None, {"Loss scale": ("optimizer step",)}),
)


def saved(page: Page, button: str) -> Path:
    with page.expect_download() as download:
        page.get_by_role("button", name=button).first.press("Enter")
    return Path(download.value.path())


@pytest.mark.slow
@pytest.mark.parametrize("shown", FIGURES, ids=lambda shown: " ".join(filter(None, (shown[0] or "overview", shown[2]))))
def test_a_figure_is_saved_as_it_is_on_screen_with_its_name(
    watched: Watched, address: str, shown: tuple[str, str, str | None, dict[str, tuple[str, ...]]]
) -> None:
    page = watched.page
    place, run, tab, figures = shown
    goto(page, address, place, run=run)
    if tab:
        page.get_by_role("tab", name=tab).click()
        settle(page)
    for name, words in figures.items():
        svg = Xml.parse(saved(page, f"SVG: {name}")).getroot()
        read = " ".join(" ".join(one.itertext()) for one in svg.iter(f"{_SVG}text"))
        for word in (name, run, *words):
            assert word in read, (name, word)
        assert not [one for one in svg.iter() if one.tag.endswith("foreignObject")]
        png = saved(page, f"PNG: {name}").read_bytes()
        assert png.startswith(b"\x89PNG")
        width = int.from_bytes(png[16:20], "big")
        assert width == 2 * int(float(svg.attrib["width"]))
    assert watched.complaints == []


def test_a_picture_opens_as_drawn(watched: Watched, address: str) -> None:
    page = watched.page
    goto(page, address, "ranks", run="ranks")
    drawn = page.locator(".amp-grid-cells i.origin").first.bounding_box()
    svg = saved(page, "SVG: Rank by step").read_text("utf-8")
    page.set_content(svg)
    shown = page.locator("svg rect[fill='rgb(213, 94, 0)'], svg rect[fill='#d55e00']").first.bounding_box()
    assert drawn is not None
    assert shown is not None
    assert shown["width"] == pytest.approx(drawn["width"], abs=0.5)
    assert shown["height"] == pytest.approx(drawn["height"], abs=0.5)


def test_a_line_in_the_path_is_copied_whole(watched: Watched, address: str) -> None:
    page = watched.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    goto(page, address, "incident", run="attention-overflow")
    page.get_by_role("tab", name="The path").click()
    line = page.locator("button.amp-line").first
    whole = line.get_attribute("data-copy")
    line.press("Enter")
    expect(line).to_have_text(re.compile("Copied"))
    assert page.evaluate("navigator.clipboard.readText()") == whole == "gpt.py:46  logits = q @ k.transpose(-2, -1)"
