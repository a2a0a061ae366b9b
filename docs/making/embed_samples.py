"""Puts the samples and what was recorded of them into the pages that show them: ``make docs``.

A page names one in a comment before a code block, whose text is the file's: ``<!-- sample: train.py -->``,
``<!-- output: train.txt -->``, or, to leave out what comes after a heading of the output, ``<!-- output: train.txt, to
Evidence -->``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1]
SAMPLES, RECORDED = (Path(__file__).with_name(name) for name in ("samples", "recorded"))

_BLOCK = re.compile(
    r"(<!-- (?:sample|output): (\S+?)(?:, to (\w+))? -->\n```\w+\n)(.*?)(^```$)", re.DOTALL | re.MULTILINE
)


def with_samples(text: str) -> str:
    """A page with the samples that it names as they are now."""
    return _BLOCK.sub(lambda match: match[1] + _shown(match[2], match[3]) + match[5], text)


def _shown(name: str, end: str | None) -> str:
    text = ((RECORDED if name.endswith(".txt") else SAMPLES) / name).read_text("utf-8")
    if end is None:
        return text
    head, found, _ = text.partition(f"\n{end}\n")
    if not found:
        raise ValueError(f"docs/making/recorded/{name} has no heading {end}")
    return f"{head.rstrip()}\n\n...\n"


def main() -> None:
    """Writes every page that has changed."""
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text("utf-8")
        if (embedded := with_samples(text)) != text:
            page.write_text(embedded, "utf-8")
            sys.stdout.write(f"{page}\n")


if __name__ == "__main__":
    main()
