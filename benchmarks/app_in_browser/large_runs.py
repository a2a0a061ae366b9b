"""How long the app takes on a large trace, in a real browser.

    python benchmarks/app_in_browser/large_runs.py FOLDER [--runs FOLDER]

FOLDER holds a trace made by ``benchmarks/large_traces/big_trace.py``; ``--runs`` one with many runs, for the list. Each
time is the median over fresh servers, from the click to the page standing still; a first page is the first of its
server, with nothing cached but the disk. Beside it stands the server's own CPU time, which a busy machine stretches
less than the wall clock. Memory is the server's peak."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "app")]

from playwright.sync_api import Browser, Page  # noqa: E402  the checkout must be importable first

from ampscope.trace.read.run import find_runs  # noqa: E402
from tests.integration.browser.driver import browse, serve  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "app.json"
_STILL = (
    "() => document.querySelector('[data-testid=stApp][data-test-script-state=notRunning]')"
    " && !document.querySelector('[data-stale=true], [data-testid=stSkeleton]')"
)
#: The track of a step, inside its shadow.
_TRACK = (
    "document.querySelector('.st-key-replay-track [data-testid=stBidiComponentIsolated]')"
    "?.shadowRoot?.querySelector('.track')?.track"
)
#: Presses a key and waits until the inspector tells of another op.
_NEXT = """async () => {
  const card = () => document.querySelector(".amp-card .amp-place")?.textContent;
  const was = card();
  document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
  while (!card() || card() === was) await new Promise((next) => setTimeout(next, 2));
}"""
#: Whether something of the page, or of a component on it, can be seen: one with these words, where some are given.
_SEEN = """([selector, words]) => {
  const components = [...document.querySelectorAll("[data-testid=stBidiComponentIsolated]")];
  return [document, ...components.map((one) => one.shadowRoot)].some((root) =>
    [...(root?.querySelectorAll(selector) ?? [])].some(
      (one) => one.checkVisibility() && (!words || one.textContent.trim() === words)));
}"""
_MOVES = 10
Times = dict[str, list[tuple[float, float]]]  #: wall and processor seconds


def still(page: Page) -> None:
    """Wait until the script has run and everything is drawn."""
    page.wait_for_timeout(30)  # until the click has reached the server
    page.wait_for_function(_STILL, timeout=120_000, polling=20)


def appears(page: Page, selector: str, words: str = "") -> None:
    """Wait until something can be seen, looked for in each frame: Playwright's own waits look once a second."""
    page.wait_for_function(_SEEN, arg=[selector, words], timeout=120_000, polling="raf")


def go_to(page: Page, title: str) -> None:
    """Go to a page by the side bar."""
    page.locator("[data-testid=stSidebar] [data-testid=stPageLink-NavLink]").filter(has_text=title).click()
    appears(page, "h1", title)
    still(page)


@contextmanager
def timed(times: Times, name: str) -> Iterator[None]:
    """Seconds on the wall, and of the server's processor."""
    begun, used = time.perf_counter(), processor(_server())
    yield
    times[name].append((time.perf_counter() - begun, processor(_server()) - used))


def visit(page: Page, times: Times, title: str) -> None:
    """Go to a page by the side bar, twice: the second time its results are known."""
    for which in ("first", "again"):
        with timed(times, f"{title}, {which}"):
            go_to(page, title)
        go_to(page, "Usage")


def heat_map(page: Page, times: Times) -> None:
    """From the click to the heat map of ranges, when nothing of it is known yet."""
    with timed(times, "Ranges, to the heat map"):
        page.locator("[data-testid=stSidebar] [data-testid=stPageLink-NavLink]").filter(has_text="Ranges").click()
        appears(page, ".cells > i")
    with timed(times, "Ranges, all of it"):
        still(page)


def press(page: Page, times: Times, name: str, act: Callable[[Page], None]) -> None:
    """An interaction within a page."""
    with timed(times, name):
        act(page)
        still(page)


def first(page: Page, times: Times, address: str, run: str) -> None:
    """The first page of one large run, as far as its verdict."""
    with timed(times, "first page"):
        page.goto(f"{address}/?run={run}")
        appears(page, ".amp-card")


def big(page: Page, times: Times, address: str, run: str, read: float = 0.0) -> None:
    """The pages of one large run, the second after so many seconds on the first."""
    first(page, times, address, run)
    with timed(times, "first page, all of it"):
        still(page)
    if page.get_by_text("what follows is a sample").count():
        raise LookupError(f"the app does not find {run}")
    time.sleep(read)
    heat_map(page, times)
    for title in ("Incident", "Ranges", "Replay", "Scale", "Precision", "Plan", "Overview"):
        visit(page, times, title)
    page.goto(f"{address}/scale?run={run}")
    appears(page, "[data-testid=stSlider]")
    still(page)
    press(page, times, "Scale: a slider of the simulator", _slide)
    page.goto(f"{address}/precision?run={run}&step=10000&source=live")
    appears(page, "h1", "Precision")
    still(page)
    page.goto(f"{address}/replay?run={run}&step=10000&source=live")
    appears(page, "h1", "Replay")
    still(page)
    page.wait_for_function(f"() => {_TRACK}?.step", timeout=120_000)
    next_op(page, defaultdict(list))  # the browser's first is slower
    for _ in range(_MOVES):
        next_op(page, times)


def next_op(page: Page, times: Times) -> None:
    """From a key to the op beside in the inspector; then until the page stands still."""
    with timed(times, "Replay: the next op, with what is drawn after it"):
        with timed(times, "Replay: the next op"):
            page.evaluate(_NEXT)
        still(page)
    page.wait_for_timeout(200)  # as a reader does; the track tells the page of no more than a move at a time


def many(page: Page, times: Times, address: str) -> None:
    """The list of many runs."""
    with timed(times, "list of runs"):
        page.goto(f"{address}/runs")
        appears(page, ".amp-data tbody tr")
    still(page)  # what is typed while the page is still being drawn may be lost
    with timed(times, "list of runs: a search"):
        page.get_by_role("textbox", name="Search", exact=True).fill("run-0123")
        page.get_by_role("textbox", name="Search", exact=True).press("Enter")
        page.wait_for_function(
            "() => document.querySelector('[data-testid=stMain]').innerText.includes('1 run;')",
            timeout=120_000,
            polling="raf",
        )


def _slide(page: Page) -> None:
    page.get_by_role("slider").first.focus()
    page.keyboard.press("ArrowLeft")


def _server() -> int:
    """The process that serves the app: the only child that is Streamlit."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
            command = (status.parent / "cmdline").read_text()
        except OSError:
            continue
        if f"PPid:\t{os.getpid()}\n" in text and "streamlit" in command:
            return int(status.parent.name)
    raise LookupError("no server")


def processor(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak(pid: int) -> float:
    """The most memory that a process has held, bytes; Linux only."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


_COLUMNS = ("wall", "server cpu")
#: Seconds in which a server has loaded what its first page needs, as while a person goes to the browser.
LOADED = 3.0
#: Seconds in which a person reads a verdict.
READ = 6.0


def _median(numbers: Sequence[float]) -> float:
    return round(statistics.median(numbers), 2)


def measure(
    browser: Browser, folder: Path, drive: Callable[..., None], *, rounds: int, age: float = 0.0, **facts: Any
) -> dict[str, Any]:
    """Drive the app on ``folder`` with a fresh server each round, from so many seconds after it began to serve."""
    times: Times = defaultdict(list)
    peaks = []
    for _ in range(rounds):
        with serve(folder) as address:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(f"{address}/_stcore/health")
            time.sleep(age)
            drive(page, times, address, **facts)
            peaks.append(peak(_server()))
            page.close()
    seconds = {
        name: dict(zip(_COLUMNS, map(_median, zip(*each, strict=True)), strict=True)) for name, each in times.items()
    }
    return {"seconds": seconds, "peak_mb": round(max(peaks) / 1e6)}


def absolute(text: str) -> Path:
    """A folder, whatever the app's own working folder is."""
    return Path(text).resolve(strict=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=absolute)
    parser.add_argument("--runs", type=absolute, help="a folder with many runs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    asked = parser.parse_args()
    run = find_runs(asked.folder)[0].relative_to(asked.folder).as_posix()
    found: dict[str, Any] = {"cores": os.cpu_count()}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed is compiled once, not by each server
    with browse() as browser:
        found["large trace"] = measure(browser, asked.folder, big, rounds=asked.rounds, run=run)
        found["large trace, read first"] = measure(browser, asked.folder, big, rounds=asked.rounds, run=run, read=READ)
        later: dict[str, Any] = {"rounds": asked.rounds, "age": LOADED}
        found["large trace, later"] = measure(browser, asked.folder, first, run=run, **later)
        if asked.runs:
            found["many runs"] = measure(browser, asked.runs, many, rounds=asked.rounds)
            found["many runs, later"] = measure(browser, asked.runs, many, **later)
    text = json.dumps({**found, "load": round(os.getloadavg()[0], 1)}, indent=2)
    sys.stdout.write(text + "\n")
    if asked.save:
        RESULTS.write_text(text + "\n")


if __name__ == "__main__":
    main()
