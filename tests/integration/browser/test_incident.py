"""From the verdict to the fix: one click to the incident, code to copy, scripts and reports to take along."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs the dev extra: pip install 'ampscope[dev]'")

from playwright.sync_api import Browser, Page, expect

from ampscope.report.html.report_page import page_of
from tests.integration.browser.driver import goto, serve, settle
from tests.integration.browser.watched import Watched
from tests.support.paths import ROOT
from tests.support.saved_operands import MM, content, save
from tests.support.scenes import SCENES
from tests.support.trace_builder import TraceBuilder

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run: a product overflows, the loss is NaN, and the operands were kept."""
    folder = tmp_path_factory.mktemp("failed")
    trace = TraceBuilder(folder / "overflow")
    trace.step(loss=float("nan"), skipped=True, traced="replay")
    bad = {"min": float("inf"), "max": float("inf"), "posinf": 64}
    lines = {"file": "/home/me/model.py", "function": "forward"}
    trace.op(trace.site("aten.mm.default", module="a", line=3, code="h = self.a(x)", **lines))
    trace.op(trace.site("aten.mm.default", module="b", line=5, code="y = h @ h.T", **lines), **bad)
    trace.op(trace.site("loss", name="loss", module="", phase="loss", file=""), **bad)
    trace.edge(0, 1)
    trace.edge(1, 2)
    trace.incident(trigger="nonfinite_loss", loss=float("inf"))
    call = replace(MM, step=0, seq=1)
    save(trace.close(), content(call), call=call)
    return folder


@pytest.fixture(scope="module")
def app(failed: Path, browser: Browser) -> Iterator[str]:
    with serve(failed) as served:
        yield served


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], accept_downloads=True)
    yield context.new_page()
    context.close()


def downloaded(page: Page, button: str) -> bytes:
    with page.expect_download() as download:
        page.get_by_role("button", name=button).click()
    return Path(download.value.path()).read_bytes()


def test_the_incident_is_one_click_from_the_verdict_and_the_fix_can_be_copied(page: Page, app: str) -> None:
    watched = Watched(page)
    goto(page, app, "", run="overflow")
    page.get_by_text("Look at it closely").click()
    page.get_by_role("tab", name="What to change").click()
    settle(page)
    code = page.locator("[data-testid=stCode]:visible").first
    code.hover()
    code.get_by_role("button").first.click()
    assert page.evaluate("navigator.clipboard.readText()").strip() in code.inner_text()
    assert watched.complaints == []


def test_the_path_is_behind_a_tab_of_the_address_and_its_ops_lead_to_replay(page: Page, app: str) -> None:
    goto(page, app, "incident", run="overflow")
    page.get_by_role("tab", name="The path").click()
    expect(page).to_have_url(re.compile("tab=the-path"))
    goto(page, app, "incident", run="overflow", tab="the-path")
    origin = page.locator(".amp-node.origin")
    expect(origin).to_contain_text("y = h @ h.T")
    origin.get_by_role("link").first.click()
    expect(page).to_have_url(re.compile("/replay.*op=1"))


def test_the_script_of_the_failed_op_comes_as_a_file(page: Page, app: str) -> None:
    goto(page, app, "incident", run="overflow", tab="take-it-along")
    script = downloaded(page, "repro.py").decode("ascii")
    ast.parse(script)
    assert "aten.mm.default" in script


def test_the_report_comes_as_a_file_that_stands_alone(page: Page, app: str, failed: Path, tmp_path: Path) -> None:
    goto(page, app, "", run="overflow")
    report = downloaded(page, "Report to send on")
    assert report.decode() == page_of(failed / "overflow")
    (tmp_path / "report.html").write_bytes(report)
    alone = Watched(page.context.new_page())
    alone.page.goto((tmp_path / "report.html").as_uri())
    expect(alone.page.locator(".amp-node.origin")).to_be_visible()
    assert alone.complaints == []
    assert alone.hosts <= {None, ""}


@pytest.mark.parametrize("name", ["attention-overflow", "clip-before-unscale", "healthy", "log-zero"])
def test_a_report_is_small_and_one_page_when_printed(browser: Browser, tmp_path: Path, name: str) -> None:
    report = tmp_path / "report.html"
    report.write_text(page_of(ROOT / "sample_logs" / name), "utf-8")
    assert report.stat().st_size < 60_000
    page = browser.new_page()
    page.goto(report.as_uri())
    printed = page.pdf(format="A4", margin={"top": "12mm", "bottom": "12mm", "left": "12mm", "right": "12mm"})
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 1
    page.close()


@pytest.mark.parametrize("width", [1280, 480])
def test_a_hostile_report_stays_text_and_on_the_page(browser: Browser, tmp_path: Path, width: int) -> None:
    SCENES["hostile"](tmp_path / "run").close()
    (tmp_path / "report.html").write_text(page_of(tmp_path / "run"), "utf-8")
    watched = Watched(browser.new_page(viewport={"width": width, "height": 900}))
    watched.page.goto((tmp_path / "report.html").as_uri())
    assert watched.page.get_by_text("bold", exact=True).count() == 0
    assert watched.page.locator("a, script, img").count() == 0
    root = watched.page.locator("html")
    assert root.evaluate("one => one.scrollWidth - one.clientWidth") <= 1
    assert watched.complaints == []
    watched.page.close()
