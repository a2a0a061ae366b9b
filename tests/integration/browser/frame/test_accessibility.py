"""Every page without a violation that axe-core finds, in light and in dark; what is Streamlit's own is listed here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="needs the dev extra: pip install 'ampscope[dev]'")

from playwright.sync_api import Browser, Page

from state import Page as Place
from tests.integration.browser.driver import each_tab, goto
from tests.integration.browser.watched import Watched
from tests.support.paths import ROOT

pytestmark = [pytest.mark.browser, pytest.mark.slow]

#: What `make axe` puts there, or another copy.
AXE = Path(os.environ.get("AMPSCOPE_AXE") or ROOT / "node_modules" / "axe-core" / "axe.min.js")

#: Streamlit's own elements that no style sheet or attribute of ours mends: rule, part of the element, reason.
STREAMLITS_OWN = (
    ("region", 'data-testid="stSkipToContent"', "the link past the side bar lies outside of all landmarks, on purpose"),
)


@pytest.fixture(scope="module")
def axe() -> str:
    if not AXE.is_file():
        pytest.skip("axe-core is not there: make axe")
    return AXE.read_text("utf-8")


def violations(page: Page, axe: str) -> list[str]:
    """What axe finds, an element a line, but for what is Streamlit's own."""
    page.evaluate(axe)
    told: dict[str, Any] = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{found['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
        for found in told["violations"]
        for node in found["nodes"]
        if not any(found["id"] == rule and part in node["html"] for rule, part, _ in STREAMLITS_OWN)
    ]


def test_a_violation_would_be_found(watched: Watched, axe: str) -> None:
    watched.page.set_content("<html lang=en><title>x</title><main><h1>x</h1><button></button></main></html>")
    assert [line.partition(":")[0] for line in violations(watched.page, axe)] == ["button-name"]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.timeout(900)  # every page and tab in turn: minutes beside others
def test_no_page_has_a_violation(browser: Browser, address: str, axe: str, theme: Any) -> None:
    page = browser.new_page(color_scheme=theme, viewport={"width": 1400, "height": 1000})
    found = {}
    for place in Place:
        for run in ("attention-overflow", "ranks"):
            goto(page, address, place.url_path, run=run)
            for tab in each_tab(page):
                found[f"{place.title} of {run} {tab}"] = violations(page, axe)
    page.close()
    assert {place: lines for place, lines in found.items() if lines} == {}
