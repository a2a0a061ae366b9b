"""The documentation is built with `mkdocs build --strict`; links lead somewhere, and nothing comes from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

#: What a browser loads by itself, by tag: the attributes that name it.
LOADED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}
#: A picture or page may be this large, in bytes, all pictures together.
MOST_PICTURES = 1_500_000


class Page(HTMLParser):
    """What a page links to, loads, and has as places."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = {name: value or "" for name, value in attrs}
        self.places |= {said[name] for name in ("id", "name") if said.get(name)}
        if tag == "a" and said.get("href"):
            self.links.append(said["href"])
        if tag in LOADED and said.get(LOADED[tag]) and said.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(said[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    settings = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file: Page(file.read_text("utf-8")) for file in site.rglob("*.html")}


def test_every_link_leads_to_a_place(site: Path, pages: dict[Path, Page]) -> None:
    lost = [
        f"{file.relative_to(site)}: {link}"
        for file, page in pages.items()
        if file.name != "404.html"  # its links are absolute, for it stands in the place of any page
        for link in page.links
        if not leads_somewhere(file, link, pages)
    ]
    assert lost == []


def leads_somewhere(file: Path, link: str, pages: dict[Path, Page]) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True
    target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
    target = target / "index.html" if target.is_dir() else target
    if not target.exists():
        return False
    return not parts.fragment or target not in pages or unquote(parts.fragment) in {"", *pages[target].places}


def test_no_page_loads_anything_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    loaded = {url for page in pages.values() for url in page.loaded}
    assert loaded
    assert [url for url in loaded if urlsplit(url).netloc] == []
    styles = "".join(sheet.read_text("utf-8") for sheet in site.rglob("*.css"))
    assert re.findall(r"url\([\"']?(https?:)?//", styles) == []


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    listed = set(re.findall(r"([\w./-]+\.md)$", nav, re.MULTILINE))
    docs = ROOT / "docs"
    there = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}
    written = {page for page in there if not page.startswith("making/") and not page.endswith(".in.md")}
    assert listed == written


def test_the_pictures_are_there_and_small() -> None:
    pictures = list((ROOT / "docs" / "pictures").iterdir())
    assert 0 < sum(picture.stat().st_size for picture in pictures) < MOST_PICTURES
    shown = "".join(page.read_text("utf-8") for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    assert [picture.name for picture in pictures if f"pictures/{picture.name})" not in shown] == []


def test_a_link_to_nowhere_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "a.html"
    file.write_text('<a id="here" href="#gone">')
    pages = {file: Page(file.read_text())}
    assert not leads_somewhere(file, "#gone", pages)
    assert not leads_somewhere(file, "b.html", pages)
    assert leads_somewhere(file, "#here", pages)
