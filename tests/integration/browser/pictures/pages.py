"""One command that takes a picture of every page of every run: ``screenshots.py [FOLDER] [OUT]``.

FOLDER holds runs (default: the samples), OUT gets the pictures (default: ``screenshots``).
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
sys.path[:0] = [str(ROOT), str(ROOT / "app")]

from playwright.sync_api import Browser  # noqa: E402  the checkout must be importable first, ViewportSize

from ampscope.trace.read.run import find_runs  # noqa: E402
from tests.integration.browser.driver import PAGES, browse, goto, serve, stretch  # noqa: E402

#: What is told apart in a file's name: colour scheme and width in pixels.
LOOKS = (("light", 1280), ("dark", 1280), ("light", 480))


def shoot_all(address: str, keys: list[str], out: Path, command: Browser) -> int:
    """A picture of every page of every run in every look; how many were taken."""
    taken = 0
    for (theme, width), key, place in product(LOOKS, keys, PAGES):
        name = f"{key.replace('/', '_')}-{place or 'overview'}-{theme}-{width}.png"
        shoot(command, address, out / name, run=key, place=place, theme=theme, width=width)
        taken += 1
    return taken


def shoot(browser: Browser, address: str, file: Path, *, run: str, place: str, theme: str, width: int) -> None:
    """One picture of a whole page."""
    page = browser.new_page(
        color_scheme="dark" if theme == "dark" else "light", viewport={"width": width, "height": 900}
    )
    goto(page, address, place, run=run)
    stretch(page, width)
    page.screenshot(path=file)
    page.close()


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0] if arguments else ROOT / "sample_logs").resolve()
    out = Path(arguments[1] if len(arguments) > 1 else ROOT / "screenshots").resolve()
    out.mkdir(parents=True, exist_ok=True)
    keys = [run.relative_to(folder).as_posix() for run in find_runs(folder)]
    with serve(folder) as address, browse() as browser:
        sys.stdout.write(f"{shoot_all(address, keys, out, browser)} pictures in {out}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
