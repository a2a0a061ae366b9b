"""Of the script on each cause's page is diagnosed what the page says: this cause, there, for this reason."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ampscope
from ampscope.analysis.results import Diagnosis
from ampscope.trace.vocabulary import Cause, Verdict
from tests.support.paths import ROOT

RECORDER: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "making" / "record_samples.py"))
SAMPLES: Path = RECORDER["SAMPLES"]
RECORDED: Path = RECORDER["RECORDED"]
#: Numbers that another machine may measure otherwise; a count and a constant of the code's are not among them.
_MEASURED = re.compile(r"-?\d+(?:[.,]\d+)+(?:e[+-]?\d+)?|\d+(?=%)")


def _place_and_reason(printed: str) -> dict[str, str]:
    """Where a diagnosis finds the fault (op, module, step, line) and why, and whether it knows a change."""
    sections = dict(section.partition("\n")[::2] for section in printed.split("\n\n"))
    told = {name: " ".join(_MEASURED.sub("#", sections[name]).split()) for name in ("Where", "Why")}
    return {**told, "Change": str("Change" in sections)}


def _cases() -> Iterator[object]:
    for sample in sorted(SAMPLES.rglob("*.py")):
        if sample.stem in list(Cause):
            takes_long = "torchrun" in sample.read_text("utf-8") or sample.stem == Cause.COMPILED_ONLY
            yield pytest.param(sample, id=sample.stem, marks=pytest.mark.slow if takes_long else ())


@pytest.mark.parametrize("sample", list(_cases()))
@pytest.mark.filterwarnings("ignore")  # the scripts are as people write them
def test_a_sample_shows_its_cause_as_its_page_says(sample: Path, tmp_path: Path) -> None:
    diagnosis: Diagnosis = ampscope.diagnose(RECORDER["train"](sample, tmp_path))
    told = {each.cause for each in diagnosis.incidents} | {each.cause for each in diagnosis.findings}
    cause = Cause(sample.stem)
    if cause.is_benign:
        assert (diagnosis.verdict, cause in told) == (Verdict.HEALTHY, True), diagnosis.summary
        return
    assert diagnosis.primary is not None
    assert diagnosis.primary.cause == cause, diagnosis.summary
    if sample.parent.name == "ahead":  # at which step it shows is measured, too
        return
    recorded = RECORDED / sample.relative_to(SAMPLES).with_suffix(".txt")
    assert _place_and_reason(RECORDER["printed"](diagnosis)) == _place_and_reason(recorded.read_text("utf-8"))
