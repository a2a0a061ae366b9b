"""How smooth Replay is on a large step, in a real browser: ``python benchmarks/large_traces/big_replay.py FOLDER``.

FOLDER is where a run lies: ``big_trace.py FOLDER/big --steps 4 --rows 2e5`` makes one with steps of 50,000 ops. Told
are the bytes that the browser is sent of a step, how long drawing takes and how far frames are apart while the track
pans (with all, a tenth and a thousandth of the step on screen), and how long it is from a key to the next op: on the
track, and in the inspector, which the server writes. Milliseconds: the median, and the 95th of a hundred.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "app")]

from playwright.sync_api import Page  # noqa: E402  the checkout must be importable first

from ampscope.trace.read.run import find_runs  # noqa: E402
from tests.integration.browser.driver import browse, serve  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "replay.json"
#: The component's own state, inside its shadow.
_TRACK = (
    "document.querySelector('.st-key-replay-track [data-testid=stBidiComponentIsolated]')"
    ".shadowRoot.querySelector('.track').track"
)
_BYTES = f"() => {_TRACK}.bytes.length"
#: Pans by a fiftieth of the screen in each frame, there and back.
_PAN = f"""async (share) => {{
  const track = {_TRACK};
  const middle = track.view.count / 2;
  track.view.set(middle - (share * track.view.count) / 2, middle + (share * track.view.count) / 2);
  const frames = [], paints = [];
  let before = await new Promise(requestAnimationFrame);
  for (let at = 0; at < 120; at++) {{
    track.canvas.dispatchEvent(new WheelEvent("wheel", {{ deltaX: at < 60 ? 18 : -18, cancelable: true }}));
    const now = await new Promise(requestAnimationFrame);
    frames.push(now - before);
    before = now;
    const begun = performance.now();
    track.paint();
    paints.push(performance.now() - begun);
  }}
  return [paints, frames];
}}"""
_STEP = f"""async () => {{
  const card = () => document.querySelector(".amp-card .amp-place").textContent;
  const [was, track, begun] = [card(), {_TRACK}, performance.now()];
  document.body.dispatchEvent(new KeyboardEvent("keydown", {{ key: "ArrowRight", bubbles: true }}));
  while (track.frame) await new Promise(requestAnimationFrame);
  const here = performance.now() - begun;
  while (card() === was) await new Promise((next) => setTimeout(next, 2));
  const there = performance.now() - begun;
  await new Promise((next) => setTimeout(next, 1000));
  return [here, there];
}}"""


def quantiles(times: list[float]) -> list[float]:
    """The median, and the 95th of a hundred."""
    ordered = sorted(times)
    return [round(ordered[int(part * (len(ordered) - 1))], 1) for part in (0.5, 0.95)]


def measured(page: Page) -> dict[str, Any]:
    """Everything, of the step on screen."""
    found: dict[str, Any] = {"bytes": page.evaluate(_BYTES)}
    for share in (1.0, 0.1, 0.001):
        paints, frames = page.evaluate(_PAN, share)
        found[f"pan, {share:g} of the step"] = {"drawing": quantiles(paints), "between frames": quantiles(frames)}
    moves = [page.evaluate(_STEP) for _ in range(20)]
    for place, name in enumerate(("track", "inspector")):
        found[f"next op, {name}"] = quantiles([each[place] for each in moves])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=lambda text: Path(text).resolve(strict=True))
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    asked = parser.parse_args()
    run = find_runs(asked.folder)[0].relative_to(asked.folder).as_posix()
    with browse() as browser, serve(asked.folder) as address:
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(f"{address}/replay?{urlencode({'run': run})}")
        page.wait_for_selector(".amp-card", timeout=120_000)
        page.wait_for_function(f"() => {_TRACK}?.step", timeout=120_000)
        page.wait_for_timeout(4000)  # until all of it stands still
        page.evaluate(_STEP)
        found = {"ops": page.evaluate(f"() => {_TRACK}.step.count"), **measured(page), "cores": os.cpu_count()}
    text = json.dumps({**found, "load": round(os.getloadavg()[0], 1)}, indent=2) + "\n"
    sys.stdout.write(text)
    if asked.save:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
