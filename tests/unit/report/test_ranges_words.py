"""Ranges in sentences."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from ampscope import open_run
from ampscope.analysis.precision.ranges.ranges import Ranges, ranges
from ampscope.report.precision_words import closest_sentence, place_words, sampled_sentence
from ampscope.trace.schema import Node, Phase, ReplayStatus, Source
from tests.support.verdicts.growing import growing


@pytest.fixture
def found(run_folder: Path) -> Ranges:
    with open_run(growing(run_folder).close()) as run:
        return ranges(run)


def test_the_closest_with_where_it_goes(found: Ranges) -> None:
    row = found.rows[0]
    assert row.forecast_step is not None
    words = closest_sentence(found)
    assert words.startswith(
        "The closest value to overflow: add in blocks.1, 7.4 bits below float16's 65,504, at step 195;"
    )
    assert f"it grows 0.029 bits a step and would get there near step {row.forecast_step:,} (" in words


def test_a_loss_with_its_scale_is_called_scaled(found: Ranges) -> None:
    loss = replace(found.rows[0], op=Node.LOSS, name="loss", module="", scale=1024.0)
    assert place_words(loss) == "the scaled loss"
    assert place_words(replace(loss, scale=None)) == "the loss"


def test_nothing_is_near(found: Ranges) -> None:
    closest = "is near overflow. The closest value: mm in blocks.0, 14.4 bits below float16's 65,504"
    rest = replace(found, rows=found.rows[1:])
    assert closest_sentence(replace(rest, scaled=0)).startswith(f"Nothing {closest}")
    assert closest_sentence(rest).startswith(f"Gradients with a loss scale aside, nothing {closest}")


def test_gradients_that_overflowed_are_told_behind(run_folder: Path) -> None:
    trace = growing(run_folder)
    read = trace.site(Node.INPUT, name="x", in_dtypes=())
    back = trace.site("aten.mm.default", module="blocks.1", phase=Phase.BACKWARD, grad_fn="MmBackward0")
    trace.step(step=200, scale=1024.0, skipped=True)
    trace.incident(step=200, replay=ReplayStatus.EXACT)
    trace.op(read, step=200, source=Source.REPLAY, min=0.0, max=12.0)
    trace.op(back, step=200, source=Source.REPLAY, min=0.0, max=math.inf, posinf=1, max_finite=2.0**14)
    trace.edge(0, 1, step=200)
    with open_run(trace.close()) as run:
        seen = ranges(run, closest=1)
    assert seen.scaled_overflow is not None
    told = " With the loss scale, mm in blocks.1 in backward overflowed 1 time."
    assert closest_sentence(seen).endswith(told)
    assert told not in closest_sentence(replace(seen, scaled_overflow=None))


def test_what_overflowed_what_is_scaled_and_what_cannot_grow(found: Ranges) -> None:
    first = replace(found.rows[0], overflowed=5, headroom_bits=0.0)
    assert closest_sentence(replace(found, rows=(first,))) == "Add in blocks.1 overflowed 5 times in float16."
    scaled = next(row for row in found.rows if row.scale is not None)
    assert "Only gradients were measured, with their loss scale." in closest_sentence(replace(found, rows=(scaled,)))
    fixed = next(row for row in found.rows if row.fixed)
    assert closest_sentence(replace(found, rows=(fixed,))) == "No value that can grow was measured in this run."


def test_a_long_run_tells_of_a_stretch_of_steps(found: Ranges) -> None:
    row = replace(found.rows[1], largest_step=3056, largest_last=3333)
    assert ", between steps 3,056 and 3,333." in closest_sentence(replace(found, rows=(row,)))


def test_the_share_of_steps_that_it_rests_on(found: Ranges) -> None:
    assert sampled_sentence(found) == "40 of 200 steps (20 %) were recorded op by op as they ran."
    assert sampled_sentence(replace(found, replayed_steps=2)).endswith("op by op as they ran, 2 more in a replay.")
