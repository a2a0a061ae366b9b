"""The pictures of the guides in ``docs/``: the app's pages on the sample runs, written to ``docs/pictures``."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[4]
sys.path[:0] = [str(ROOT), str(ROOT / "app")]

from PIL import Image  # noqa: E402  the checkout must be importable first
from playwright.sync_api import Browser  # noqa: E402

from tests.integration.browser.driver import browse, goto, serve  # noqa: E402

#: Pixels; a page is cut off at the bottom of the window.
WIDTH = 1280


@dataclass(frozen=True)
class Picture:
    """One page of the app on one sample run, as high as what it has to show."""

    name: str
    run: str
    place: str
    height: int = 800
    query: dict[str, str] = field(default_factory=dict)


OVERFLOW, CLIPPED, HEALTHY = "attention-overflow", "clip-before-unscale", "healthy"
RANKS = "four-ranks"
PICTURES = (
    Picture("overview", OVERFLOW, "", 900),
    Picture("incident", OVERFLOW, "incident", 1000),
    Picture("replay", OVERFLOW, "replay", 900),
    Picture("ranges", OVERFLOW, "ranges", 800),
    Picture("scale", HEALTHY, "scale", 900),
    Picture("precision", OVERFLOW, "precision", 800),
    Picture("plan", OVERFLOW, "plan", 800),
    Picture("usage", CLIPPED, "usage", 800),
    Picture("ranks", RANKS, "ranks", 800),
    Picture("compare", OVERFLOW, "compare", 900),
    Picture("runs", OVERFLOW, "runs", 700),
    Picture("wall", HEALTHY, "wall", 700),
)


def shoot(browser: Browser, address: str, picture: Picture, out: Path) -> None:
    """One picture of the upper part of a page, as WebP."""
    page = browser.new_page(color_scheme="light", viewport={"width": WIDTH, "height": picture.height})
    goto(page, address, picture.place, run=picture.run, **picture.query)
    page.wait_for_timeout(500)
    with Image.open(io.BytesIO(page.screenshot())) as image:
        image.save(out / f"{picture.name}.webp", quality=82, method=6)
    page.close()


@contextmanager
def copied(folder: Path, chosen: list[Picture]) -> Iterator[Path]:
    """The sample runs, and a job where one is shown, at a place whose name says nothing of the machine."""
    runs = folder / "ampscope_runs"
    shutil.copytree(ROOT / "sample_logs", runs)
    if any(picture.run == RANKS for picture in chosen):
        _train_ranks(runs / RANKS)
    yield runs


def _train_ranks(folder: Path) -> None:
    program = Path(__file__).with_name("four_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(program)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(folder)], env=environment, check=True, capture_output=True)


def main(arguments: list[str]) -> None:
    """Take those that are named, or all."""
    out = ROOT / "docs" / "pictures"
    out.mkdir(exist_ok=True)
    chosen = [picture for picture in PICTURES if not arguments or picture.name in arguments]
    with (
        TemporaryDirectory() as folder,
        copied(Path(folder), chosen) as runs,
        serve(runs) as address,
        browse() as browser,
    ):
        for picture in chosen:
            shoot(browser, address, picture, out)
    sys.stdout.write(f"{len(chosen)} pictures in {out}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
