"""The code blocks of README and guides, each with the comment before it that says how it is run, or why not.

<!-- setup: loop -->         names that the block uses, and files: a function of `tests.docs.setups`
<!-- not run: it installs --> a reason
<!-- sample: train.py -->    the text of a file in docs/making/samples, which is written into the block's folder
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.paths import ROOT

_FENCE = re.compile(
    r"^(?:<!-- (?P<how>setup|not run|sample): (?P<what>.*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
#: Of these somebody runs what stands there; others are outputs.
RUNNABLE = ("python", "bash")
#: Pages whose blocks have tests of their own.
ELSEWHERE = ("docs/trace-format.md", "docs/trace-format.in.md")


@dataclass(frozen=True)
class Block:
    """A piece of code that a reader may copy."""

    page: str
    line: int
    language: str
    text: str
    how: str  #: ``setup``, ``not run``, ``sample``, or empty
    what: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
    """Those of README and of every page that is not made from the catalogue."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        block
        for page in pages
        if not page.is_relative_to(ROOT / "docs" / "causes") and not page.is_relative_to(ROOT / "docs" / "making")
        for block in blocks_of(page.relative_to(ROOT).as_posix(), page.read_text("utf-8"))
        if block.page not in ELSEWHERE
    ]


def blocks_of(page: str, text: str) -> Iterator[Block]:
    """The runnable blocks of a page."""
    for match in _FENCE.finditer(text):
        if match["language"] in RUNNABLE:
            line = text.count("\n", 0, match.start("text")) + 1
            yield Block(page, line, match["language"], match["text"], match["how"] or "", match["what"] or "")
