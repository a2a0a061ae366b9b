"""Each cause has a page made from the catalogue, and a script that shows it.

That what the pages show is diagnosed of the scripts is tested in `tests.integration.causes.test_samples`.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from ampscope.trace.vocabulary import Cause
from tests.support.paths import ROOT

MAKING = ROOT / "docs" / "making"
GENERATOR: dict[str, Any] = runpy.run_path(str(MAKING / "generate_causes.py"))
EMBEDDED: dict[str, Any] = runpy.run_path(str(MAKING / "embed_samples.py"))
PAGES: dict[Path, str] = GENERATOR["pages"]()
SAMPLES = sorted(path for path in (MAKING / "samples").rglob("*.py") if path.stem in list(Cause))


def test_the_pages_are_those_of_the_catalogue() -> None:
    folder = ROOT / "docs" / "causes"
    there = {page.relative_to(folder): page.read_text("utf-8") for page in folder.rglob("*.md")}
    assert set(there) == set(PAGES), "run `make docs`"
    assert [page for page, text in PAGES.items() if there[page] != text] == [], "run `make docs`"


def test_every_cause_has_a_page_and_its_notes() -> None:
    told = [cause for family in GENERATOR["FAMILIES"] for cause in family.notes]
    assert sorted(told) == sorted(Cause)
    assert [cause for family in GENERATOR["FAMILIES"] for cause, notes in family.notes.items() if not all(notes)] == []


def test_every_cause_has_a_sample_or_a_reason() -> None:
    assert {path.stem for path in SAMPLES} | set(GENERATOR["NO_SAMPLE"]) == set(Cause)


@pytest.mark.parametrize(
    ("page", "cures"),
    [
        ("mathematics/sqrt_negative", ("from centred values", "from below by zero")),
        ("mathematics/div_zero", ("Bound the divisor", "Leave out what is empty", "away from 1 and -1")),
        ("mathematics/divergence", ("Lower the learning rate", "Clip the gradient's norm", "Bound what")),
        ("range/fp16_overflow", ("queries and keys", "Square and average in float32", "Accumulate in float32")),
        ("usage/misuse_no_unscale", ("Unscale first", "Step through the scaler")),
        ("usage/misuse_multiple_scalers_update", ("once per optimizer step", "Step every optimizer, then update once")),
    ],
)
def test_a_page_tells_the_cures_of_each_way_that_it_comes_about(page: str, cures: tuple[str, ...]) -> None:
    told = PAGES[Path(f"{page}.md")].partition("## What cures it")[2].partition("\n## ")[0]
    assert [cure for cure in cures if cure not in told] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_samples_are_shown_as_they_are(page: Path) -> None:
    text = page.read_text("utf-8")
    assert EMBEDDED["with_samples"](text) == text, "run `make docs`"
