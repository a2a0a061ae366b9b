"""The figure of a heat map of ranges."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ampscope import open_run
from ampscope.analysis.precision.ranges.heat_map import Measure, View, heat_map
from ampscope.analysis.precision.ranges.measured import measured_places
from ampscope.analysis.precision.ranges.places import ValueKind
from ampscope.report.figures.heat_map_figure import FULL, GROUPS, MEASURES, HeatFigure, heat_figure
from ampscope.trace.schema import Source
from tests.support.trace_builder import TraceBuilder
from tests.support.verdicts.growing import UNMEASURED, growing


def figure(folder: Path, view: View | None = None) -> HeatFigure:
    with open_run(folder) as run:
        found = measured_places(run)
    view = view or View()
    return heat_figure(heat_map(found, view), found, as_tree=not view.closest_first)


def test_every_choice_has_words() -> None:
    assert set(MEASURES) == set(Measure)
    assert set(GROUPS) == set(ValueKind)


def test_a_cell_says_what_is_closest_and_how_close(run_folder: Path) -> None:
    seen = figure(growing(run_folder).close())
    assert [(row.name, row.hint, row.depth) for row in seen.rows] == [
        ("blocks", "blocks", 0),
        ("1", "blocks.1", 1),
        ("0", "blocks.0", 1),
    ]
    grown = seen.rows[1]
    assert seen.words[grown.words[0]] == "13.0 bits of headroom"
    assert seen.places[grown.places[0]] == "add, forward, float16"
    assert (seen.columns[0], seen.columns[-1], seen.steps[-1]) == ("step 0", "step 195", 195)
    assert [words for _, words in seen.ticks] == ["0", "35", "70", "105", "140", "175"]
    assert seen.unit.startswith("bits")


def test_the_closer_the_fuller_and_its_curve_rises(run_folder: Path) -> None:
    grown = figure(growing(run_folder).close()).rows[1]
    shades = [shade for shade in grown.shades if shade is not None]
    assert len(shades) == 40
    assert shades == sorted(shades)
    assert shades[-1] > shades[0]
    assert (grown.heights[0], grown.worst) == (0, 39)


def test_what_is_near_and_what_was_not_measured_are_told_apart(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    near, once = trace.site("aten.mm.default", module="a"), trace.site("aten.mm.default", module="b")
    for step in range(3):
        trace.step(traced=Source.LIVE)
        trace.op(near, step=step, source=Source.LIVE, min=0.0, max=60000.0 + step, **UNMEASURED)
    trace.op(once, step=1, source=Source.LIVE, min=0.0, max=math.pi, **UNMEASURED)
    seen = figure(trace.close())
    assert (seen.rows[0].marks, seen.marks) == ((1, 1, 1), (1,))
    assert seen.rows[0].shades[0] is not None
    assert seen.rows[0].shades[0] >= FULL - 2
    assert [shade is None for shade in seen.rows[1].shades] == [True, False, True]
    assert [place < 0 for place in seen.rows[1].places] == [True, False, True]
    assert seen.rows[1].heights[0] is None


def test_without_its_parents_a_row_has_the_end_of_its_whole_name(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    name = "model.decoder.layers.11.self_attention.output_projection"
    trace.step(traced=Source.LIVE)
    trace.op(trace.site("aten.mm.default", module=name), step=0, source=Source.LIVE, min=0.0, max=2.0)
    (row,) = figure(trace.close(), View(closest_first=True)).rows
    assert name.endswith(row.name[1:])
    assert (len(row.name), row.hint, row.depth) == (31, name, 0)


@pytest.mark.parametrize(
    ("measure", "words"),
    [(Measure.UNDERFLOW, "4.0 bits above the smallest normal"), (Measure.SUBNORMAL, "10 % subnormal")],
)
def test_each_measure_has_its_words(measure: Measure, words: str, run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.step(traced=Source.LIVE)
    site = trace.site("aten.mm.default", module="a")
    trace.op(site, step=0, source=Source.LIVE, numel=100, min=0.0, max=2.0**-10, zeros=20, subnormals=8)
    seen = figure(trace.close(), View(measure=measure))
    assert seen.words[seen.rows[0].words[0]] == words
    assert (seen.rows[0].marks, seen.marks) == ((0,), ())
