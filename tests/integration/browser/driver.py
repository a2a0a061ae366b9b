"""Drives the app in a headless Chromium: starts the server, opens pages, waits until they are drawn."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import Browser, Page, expect, sync_playwright

import state
from tests.support.paths import ROOT

#: Below the app's address.
PAGES = tuple(page.url_path for page in state.Page)
_START_S = 60
#: How long a busy machine may take to draw a page, beside a training too.
PATIENCE_MS = 90_000
_DRAWN = "[data-testid=stMain] h1, [data-testid=stMain] .amp-card"


def chromium() -> str | None:
    """The browser of the machine, or None: then Playwright's own is tried."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def serve(folder: Path, *named: str) -> Iterator[str]:
    """The app on the runs in ``folder``, or on what is named instead, on a free port; yields its address."""
    port = _free_port()
    arguments = [
        *(sys.executable, "-m", "streamlit", "run"),
        str(ROOT / "app"),
        "--server.headless",
        "true",
        "--server.port",
        str(port),
        "--",
        *(named or (str(folder),)),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(arguments, cwd=folder, env=environment) as process:
        try:
            _wait_for(f"http://localhost:{port}/_stcore/health", process)
            yield f"http://localhost:{port}"
        finally:
            process.terminate()


@contextmanager
def browse() -> Iterator[Browser]:
    """A headless browser that loads nothing from outside."""
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=flags)
        yield browser
        browser.close()


def goto(page: Page, address: str, place: str, **query: str) -> None:
    """Open a page of the app and wait until it is drawn whole."""
    page.goto(f"{address}/{place}?{urlencode(query)}")
    page.wait_for_selector(_DRAWN, timeout=PATIENCE_MS)
    settle(page)


def walk(page: Page) -> Iterator[str]:
    """Visit every page by the side bar and wait until it is drawn; yields their names."""
    links = page.locator("[data-testid=stSidebar] [data-testid=stPageLink-NavLink]")
    for number in range(links.count()):
        name = links.nth(number).inner_text().strip()
        links.nth(number).click()
        page.wait_for_selector(_DRAWN, timeout=PATIENCE_MS)
        settle(page)
        yield name


def each_tab(page: Page) -> Iterator[str]:
    """Open the tabs of a page one after the other; yields their names, or nothing's once where it has none."""
    for name in page.get_by_role("tab").all_inner_texts() or [""]:
        if name:
            page.get_by_role("tab", name=name, exact=True).click()
            settle(page)
        yield name


def settle(page: Page) -> None:
    """Wait until the script has run to its end and the figures stand still."""
    page.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]", timeout=PATIENCE_MS)
    page.wait_for_function(
        "document.querySelectorAll('[data-stale=true], [data-testid=stSkeleton]').length === 0", timeout=PATIENCE_MS
    )
    page.wait_for_timeout(300)


def stretch(page: Page, width: int) -> None:
    """Make the window as tall as the page, so that a picture shows all of it."""
    for _ in range(3):  # figures grow when there is room, so look again
        height = page.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight")
        page.set_viewport_size({"width": width, "height": min(int(height) + 20, 12_000)})
        page.wait_for_timeout(500)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def _wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    straight = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxy a test has asked for
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "the app's server ended before it answered"
        try:
            with straight.open(address, timeout=2):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise AssertionError(f"{address} did not answer within {_START_S} s")
