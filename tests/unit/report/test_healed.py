"""What healing has changed is told in the terminal and in the report; a run without healing has no such part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampscope.analysis.results import MadeCure
from ampscope.report.diagnosis_words import cure_in_words
from ampscope.report.html.cards import healed_html
from ampscope.report.terminal.diagnosis_text import as_text
from tests.support.printed import printed
from tests.support.verdicts.by_hand import BROKEN

CURE = MadeCure(
    step=3,
    kind="modules_fp32",
    modules=("blocks.1",),
    code='ampscope.keep_fp32(model, ["blocks.1"])',
    lifted_at=200,
    text="blocks.1 in float32",
    applied=True,
)
SINCE = "Healing changed the training at step 3, and the failure has not come back in the 40 steps since."
HEALED = replace(BROKEN, cures=(CURE,), since=SINCE)
TITLE = "What was changed in this run"


def test_the_terminal_tells() -> None:
    told = " ".join(printed(as_text(HEALED)).split())
    assert TITLE in told
    assert "Step 3: blocks.1 in float32 from the next step on; the step was made with the gradients of its" in told
    assert "lifted at step 200." in told
    assert CURE.code in told
    assert SINCE in told
    assert TITLE not in printed(as_text(BROKEN))


def test_the_card_tells() -> None:
    card = healed_html(HEALED)
    assert TITLE in card
    assert "lifted at step 200" in card
    assert "ampscope.keep_fp32(model, [&quot;blocks.1&quot;])" in card
    assert SINCE in card
    assert healed_html(BROKEN) == ""


@pytest.mark.parametrize(
    ("cure", "told"),
    [
        (replace(CURE, lifted_at=None), "; the step was made with the gradients of its replay; still in force."),
        (replace(CURE, lifted_because="it is slow"), "; lifted at step 200, for it is slow."),
        (
            replace(CURE, lifted_at=None, applied=False, lost="late"),
            "; the step itself is lost (late); still in force.",
        ),
        (replace(CURE, lifted_at=None, applied=False, at_once=True), " from this step on; still in force."),
        (replace(CURE, lifted_at=None, code=""), "in float32; the step was made with the gradients of its replay."),
    ],
)
def test_what_has_become_of_it_is_told(cure: MadeCure, told: str) -> None:
    assert cure_in_words(cure).endswith(told)
