"""Pages left open on a real training process: they follow it, tell what goes wrong, and rest when it is dead."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs the dev extra: pip install 'ampscope[dev]'")

from playwright.sync_api import Page, expect

from tests.integration.browser.driver import PAGES, goto, serve
from tests.integration.browser.watched import Watched
from tests.support.paths import ROOT
from tests.support.trace_builder import TraceBuilder

pytestmark = pytest.mark.browser

#: Milliseconds within which a page must show what has happened, on a busy machine.
SOON = 30_000


class Training:
    """A training process, and the folder from which it takes orders."""

    def __init__(self, folder: Path) -> None:
        self.runs, self.orders = folder / "runs", folder / "orders"
        self.runs.mkdir()
        self.orders.mkdir()
        program = [
            sys.executable,
            "-m",
            "tests.integration.browser.live.training",
            str(self.runs / "train"),
            str(self.orders),
        ]
        self.process = subprocess.Popen(program, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        deadline = time.monotonic() + 120
        while not (self.runs / "train" / "run.json").exists():
            assert self.process.poll() is None, "the training ended at once"
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def spoil(self) -> None:
        """Make a batch bad."""
        (self.orders / "spoil").touch()

    def kill(self) -> None:
        """End the process as the kernel would."""
        self.process.kill()
        self.process.wait()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    started = Training(tmp_path)
    yield started
    started.kill()


def steps_shown(page: Page) -> int:
    return int(page.locator(".amp-tile b").first.inner_text().replace(",", ""))


@pytest.mark.slow  # a training, a server and three pages, at the pace at which pages look again
@pytest.mark.timeout(900)  # a training with pauses, looked at all the while: minutes beside others
def test_a_page_follows_a_training_to_its_end(watched: Watched, training: Training) -> None:
    page = watched.page
    with serve(training.runs) as address:
        for place in PAGES:
            goto(page, address, place, run="train")
            assert page.locator("[data-testid=stException]").count() == 0, place
        goto(page, address, "", run="train")
        expect(page.get_by_text("Being written now")).to_be_visible()
        before = steps_shown(page)
        page.wait_for_function(
            "before => Number(document.querySelector('.amp-tile b').innerText.replaceAll(',', '')) > before",
            arg=before,
            timeout=SOON,
        )
        assert page.context.browser is not None
        others = {place: page.context.browser.new_page() for place in ("incident", "precision")}
        for place, other in others.items():
            goto(other, address, place, run="train")
        expect(others["incident"].get_by_text("Nothing went wrong")).to_be_visible()
        expect(others["precision"].get_by_text("has been traced since")).to_be_visible(timeout=SOON)
        training.spoil()
        expect(others["incident"].locator(".amp-card.error")).to_contain_text("logarithm", timeout=SOON)
        expect(page.get_by_test_id("stToast").first).to_contain_text("1 new incident", timeout=SOON)
        expect(page.locator(".amp-card.error")).to_contain_text("logarithm", timeout=SOON)
        training.kill()
        expect(page.get_by_text("Its process died")).to_be_visible(timeout=SOON)
        expect(page.get_by_test_id("stSidebar").get_by_text(re.compile(r"^Step .* ago\."))).to_have_count(
            0, timeout=SOON
        )
    assert watched.complaints == []


def test_a_silent_run_says_so(watched: Watched, tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "stuck")
    trace.step(time=time.time() - 600, duration_s=0.5)
    trace.leave_open()
    with serve(tmp_path) as address:
        goto(watched.page, address, "scale", run="stuck")
        side = watched.page.get_by_test_id("stSidebar")
        expect(side.get_by_text("silent", exact=True)).to_be_visible()
        expect(side.get_by_text("10 minutes ago. Nothing was heard since where a step takes 500 ms")).to_be_visible()
    trace.close()
    assert watched.complaints == []
