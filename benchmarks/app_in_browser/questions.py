"""Seconds from the first click to each answer, in a real browser.

    python benchmarks/app_in_browser/questions.py [--times 5]

The runs are the samples and the scenes of the tests; the verdict's page stands still before the first click, and each
question begins with a page of its own, of one server that has answered all of them once before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "app")]

from playwright.sync_api import Browser  # noqa: E402  the checkout must be importable first

from tests.integration.browser.driver import browse, goto, serve  # noqa: E402
from tests.integration.browser.frame.questions import QUESTIONS, Question  # noqa: E402
from tests.support.scenes import write_scenes  # noqa: E402


def seconds(browser: Browser, address: str, question: Question) -> float:
    """From the first click until the answer can be read."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    goto(page, address, "", run=question.run)
    begun = time.perf_counter()
    for click in question.clicks:
        click(page).click()
    question.shown(page).wait_for(timeout=60_000)
    took = time.perf_counter() - begun
    page.close()
    return took


def main() -> None:
    """Prints a row for each question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    times = parser.parse_args().times
    with tempfile.TemporaryDirectory() as folder:
        write_scenes(Path(folder))
        with serve(Path(folder)) as address, browse() as browser:
            for each in QUESTIONS:
                seconds(browser, address, each)
            print(f"{'question':40} clicks  median  longest, s")
            for each in QUESTIONS:
                took = [seconds(browser, address, each) for _ in range(times)]
                print(f"{each.asked:40} {len(each.clicks):6} {statistics.median(took):7.2f} {max(took):8.2f}")


if __name__ == "__main__":
    main()
