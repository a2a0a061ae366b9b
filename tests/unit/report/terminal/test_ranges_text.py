"""The ranges of a run as the terminal shows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ampscope import open_run
from ampscope.analysis.precision.ranges.ranges import Ranges, ranges
from ampscope.report.terminal.ranges_text import as_text
from ampscope.trace.schema import Node, Phase, Source
from tests.support.printed import printed
from tests.support.verdicts.growing import growing

_DTYPES = ("float16", "float16", "float32")


@pytest.fixture
def found(run_folder: Path) -> Ranges:
    with open_run(growing(run_folder).close()) as run:
        return ranges(run)


def closest(found: Ranges, count: int) -> Ranges:
    return replace(found, rows=found.rows[:count])


def test_the_closest_places_with_where_they_are_going(found: Ranges) -> None:
    text = printed(as_text(closest(found, 2)), width=160)
    assert (
        "40 of 200 steps (20%) were recorded op by op as they ran; these are the 2 of 6 places closest to overflow."
        in text
    )
    first, second = text.splitlines()[4:6]
    assert first.split()[1:4] == ["add", "in", "blocks.1"]
    assert "train.py:12" in first
    assert f"step {found.rows[0].forecast_step:,} (" in first
    assert "not measured" in first
    assert second.split()[1:4] == ["mm", "in", "blocks.0"]
    assert "(" not in second


def test_it_is_said_why_some_come_last(found: Ranges) -> None:
    text = printed(as_text(found), width=160)
    assert "Gradients carry the loss scale" in text
    assert "cannot grow" in text
    assert "Gradients" not in printed(as_text(closest(found, 2)), width=160)


def test_a_narrow_terminal_keeps_what_matters(found: Ranges) -> None:
    text = printed(as_text(closest(found, 2)), width=60, terminal=True)
    assert "headroom" in text
    assert "add in" in text
    assert "subnormal" not in text


def test_a_run_without_traced_steps_says_how_to_record_some() -> None:
    assert "every=100" in printed(as_text(Ranges(steps=3)))


def test_what_is_no_op_is_told_in_words(run_folder: Path) -> None:
    trace = growing(run_folder)
    names = {
        Node.STATE_AFTER: ("fc", "exp_avg of fc.weight"),
        Node.LOSS: ("", "loss"),
        Node.INPUT: ("fc", "an operand of aten.add.Tensor"),
        Node.GRADIENT: ("fc", "fc.bias"),
    }
    for op, (module, name) in names.items():
        trace.op(trace.site(op, module=module, name=name), step=5, source=Source.LIVE)
    with open_run(trace.close()) as run:
        text = printed(as_text(ranges(run)), width=200)
    for words in (
        "exp_avg of fc.weight after the step  ",
        "the loss  ",
        "an input of add in fc",
        "the gradient of fc.bias  ",
    ):
        assert words in text
    assert "aten" not in text


def test_overflows_and_replays_are_told(found: Ranges) -> None:
    told = replace(found, replayed_steps=3, places=1, rows=(replace(found.rows[0], overflowed=5, headroom_bits=0.0),))
    text = printed(as_text(told), width=160)
    assert "were recorded op by op as they ran, 3 more in a replay; these are the 1 of 1 place closest" in text
    assert "overflowed 5 times" in text
    scaled = replace(found.rows[1], overflowed=2, phase=Phase.BACKWARD)
    words = "With the loss scale, mm in blocks.0 in backward overflowed 2 times."
    assert words in printed(as_text(replace(found, scaled_overflow=scaled)), width=160)
    assert words not in printed(as_text(found), width=160)
    some = replace(told, rows=(replace(told.rows[0], overflowed_at_least=True),))
    assert "overflowed at least 5 times" in printed(as_text(some), width=160)
    assert "step " not in text.splitlines()[4]


def test_zeros_that_float32_would_not_have_had_are_told_or_not_known(found: Ranges) -> None:
    first, second, third = (replace(row, dtype=dtype) for row, dtype in zip(found.rows, _DTYPES, strict=False))
    some = replace(first, flushed_share=0.25)
    text = printed(as_text(replace(found, rows=(some, second, third))), width=220)
    known, unknown, in_float32 = text.splitlines()[4:7]
    assert known.rstrip().endswith("25%")
    assert unknown.rstrip().endswith("not known")
    assert in_float32.rstrip().endswith("not measured")  # of its zeros; what float32 has, it keeps
    assert "keeps them" in text
    none = printed(as_text(replace(found, rows=(second, third))), width=220)
    assert "keeps them" not in none
