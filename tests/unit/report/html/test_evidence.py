"""What a page says of the tensors that an op read and wrote."""

from __future__ import annotations

import re

from ampscope.analysis.results import LastGood
from ampscope.report.html.incident_sections import last_good_html, operand_table, tripped_heading
from ampscope.trace.schema import Trigger
from tests.support.verdicts.by_hand import LAST_GOOD
from tests.support.verdicts.operands import operand


def cells(text: str, tag: str) -> list[str]:
    return re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", text)


def test_every_heading_has_its_cell() -> None:
    drawn = operand_table([operand(role="input 0", dtype="float16", shape="2x3", numel=6, min=-1.0, max=2.0, zeros=3)])
    named = dict(zip(cells(drawn, "th"), cells(drawn, "td"), strict=True))
    assert (named["Tensor"], named["Type"], named["Shape"]) == ("input 0", "float16", "2x3")
    assert named["Values"] == "-1 to 2"
    assert named["Exactly zero"] == "3 (50 %)"
    assert named["Subnormal"] == "not measured"


def test_what_is_not_finite_is_counted() -> None:
    nan = float("nan")
    bad = operand(role="output 0", dtype="float32", shape="6", numel=6, min=nan, max=nan, nan=2, posinf=1)
    drawn = operand_table([bad])
    assert "2 NaN, 1 inf" in cells(drawn, "td")


def test_parameters_are_listed_under_what_is_the_matter_with_them() -> None:
    assert tripped_heading(Trigger.NONFINITE_GRADIENT) == "Gradients that were not finite"
    assert "lost" in tripped_heading(Trigger.LOST_GRADIENT)
    assert "finite" not in tripped_heading(Trigger.LOST_GRADIENT)
    assert tripped_heading(Trigger.NONFINITE_BUFFER) == "Buffers that were not finite"
    assert "radient" not in tripped_heading(Trigger.NONFINITE_STATE)


def test_what_moved_since_the_last_good_step_is_a_table() -> None:
    drawn = last_good_html(LAST_GOOD)
    assert drawn.startswith("<p>Last good step: 293.")
    told = [each.replace("<wbr>", "") for each in cells(drawn, "td")]
    assert told[:5] == ["learning rate", "0.001", "0.1", "291", "it had never moved"]
    assert told[5:10] == ["zeros in input x", "10 %", "90 %", "294", "more than it usually moves"]
    assert told[10:] == ["magnitude of mm in blocks.0", "3", "90", "294", "seen too rarely to tell"]


def test_where_nothing_is_known_of_good_steps_nothing_is_shown() -> None:
    assert last_good_html(None) == ""
    assert "table" not in last_good_html(LastGood(step=None, summary="None is good."))
