"""Figures drawn as HTML: what they show is where it belongs, and nothing that matters is left out."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ampscope.analysis.arrays import Curve
from ampscope.analysis.overview.overview import Overview
from ampscope.analysis.results import Incident, Operand, PathNode, Tried
from ampscope.analysis.step_graph import IncidentSurroundings
from ampscope.report.figures.magnitudes_figure import magnitudes
from ampscope.report.figures.path_graph import path_graph
from ampscope.report.figures.stack import Lane, Stack, Symbol
from ampscope.report.figures.step_figures import timeline_stack
from ampscope.report.html.ops_svg import magnitudes_html, path_graph_html
from ampscope.report.html.stack_svg import stack_html
from ampscope.trace.schema import Change, Trial
from ampscope.trace.vocabulary import Cause, Severity
from tests.support.verdicts import operands


def operand(role: str = "input 0", **facts: object) -> Operand:
    told = {"dtype": "float16", "shape": "8", "min": -4.0, "max": 3.0, "numel": 8, "exp_low": 0, "exp_counts": (2, 6)}
    return operands.operand(role=role, **{**told, **facts})


OVERFLOWN = operand("output 0", min=-4.0, max=math.inf, posinf=4, neginf=0, nan=0, exp_low=14, exp_counts=(1, 3))


def draw_magnitudes(operands: Sequence[Operand], tried: Sequence[Tried] = ()) -> str:
    return magnitudes_html(magnitudes(operands, tried))


def draw_path(incident: Incident, seen: IncidentSurroundings) -> str:
    return path_graph_html(path_graph(incident, seen))


class TestMagnitudes:
    def test_without_counts_there_is_no_picture(self) -> None:
        assert draw_magnitudes([operand(exp_low=None, exp_counts=())]) == ""

    def test_each_power_has_a_bar_with_its_share(self) -> None:
        drawn = draw_magnitudes([operand()])
        assert re.findall(r'title="([^"]*)"', drawn) == [
            "2\u2070 to 2\u00b9: 2 elements, 2 (25 %)",
            "2\u00b9 to 2\u00b2: 6 elements, 6 (75 %)",
        ]

    def test_what_became_infinite_stands_beyond_the_largest_number(self) -> None:
        drawn = draw_magnitudes([OVERFLOWN])
        beyond = _left(re.search(r'amp-beyond high" style="([^"]*)"', drawn))
        lost = _left(re.search(r'<i style="([^"]*)" title="4 elements became infinite"', drawn))
        assert beyond < lost < beyond + 1
        assert "and 4 inf" in drawn

    def test_a_tensor_of_zeros_says_so(self) -> None:
        zeros = operand("input 1", min=0.0, max=0.0, zeros=8, exp_low=None, exp_counts=())
        drawn = draw_magnitudes([operand(), zeros])
        assert "8 (100 %) exactly zero" in drawn
        assert "no finite value other than 0" in drawn

    def test_what_float32_gives_is_marked_on_the_result_alone_and_inside_the_picture(self) -> None:
        tried = Tried(step=0, change=Change.FP32, outcome=Trial.FINITE, op_min=-1.0, op_max=2.0**20)
        drawn = draw_magnitudes([operand(), OVERFLOWN], [tried])
        assert drawn.count("in float32 this op reaches") == 1
        assert 0 < _left(re.search(r'amp-reach" style="([^"]*)"', drawn)) < 100
        finite = operand("output 1")
        assert draw_magnitudes([OVERFLOWN, finite], [tried]).count("in float32 this op reaches") == 1
        assert draw_magnitudes([finite], [tried]).count("in float32 this op reaches") == 1

    @pytest.mark.parametrize("ends", [(math.nan, math.nan), (0.0, 0.0), (None, None), (-math.inf, math.inf)])
    def test_a_float32_replay_without_a_number_is_not_marked(self, ends: tuple[float | None, float | None]) -> None:
        tried = Tried(step=0, change=Change.FP32, outcome=Trial.NONFINITE, op_min=ends[0], op_max=ends[1])
        assert "amp-reach" not in draw_magnitudes([OVERFLOWN], [tried])

    def test_of_hundreds_of_operands_those_that_matter_are_drawn(self) -> None:
        many = [operand(f"input {number}") for number in range(300)]
        many[200] = operands.changed(many[200], posinf=1, max=math.inf)
        drawn = draw_magnitudes([*many, OVERFLOWN])
        assert drawn.count("amp-histogram") == 6
        assert "input 200" in drawn
        assert "output 0" in drawn
        assert "295 more tensors" in drawn

    def test_a_dtype_that_is_not_known_has_no_limits(self) -> None:
        assert "amp-beyond" not in draw_magnitudes([operand(dtype="float4_e2m1")])


class TestPath:
    def test_forward_leads_to_the_right_and_backward_to_the_left(self) -> None:
        drawn = draw_path(
            _incident(_node("a"), _node("b"), _node("b", phase="backward"), _sink("gradient")), IncidentSurroundings()
        )
        forward, backward = drawn.index('amp-flow forward"'), drawn.index('amp-flow backward"')
        assert forward < drawn.index("origin") < backward < drawn.index("reached")

    def test_a_long_chain_is_folded_and_counted_and_still_there(self) -> None:
        drawn = draw_path(_incident(*(_node(f"block{number}") for number in range(20))), IncidentSurroundings())
        assert "15 more ops in 15 modules" in drawn
        assert all(f"block{number}<" in drawn for number in range(20))

    def test_many_ops_of_one_module_are_folded(self) -> None:
        drawn = draw_path(_incident(*(_node("block") for _ in range(9))), IncidentSurroundings())
        assert "6 more ops" in drawn
        assert drawn.count("<header>") == 1

    def test_the_models_own_code_is_told_from_code_outside(self) -> None:
        drawn = draw_path(_incident(_node("", module_type="GPT"), _node("")), IncidentSurroundings())
        assert drawn.index("GPT") < drawn.index("outside the watched modules")

    def test_what_the_loop_carries_is_called_so_once(self) -> None:
        state = replace(_sink("carried_after"), name="carried tensor 2")
        drawn = draw_path(_incident(_node("a"), state), IncidentSurroundings())
        assert "after: carried tensor 2" in drawn
        assert drawn.count("carried") == drawn.count("carried tensor 2") + drawn.count("carried_after")

    def test_without_a_path_there_is_no_picture(self) -> None:
        assert draw_path(_incident(), IncidentSurroundings()) == ""


class TestTimeline:
    def test_a_spike_is_drawn_to_its_top(self) -> None:
        curve = Curve(steps=tuple(range(100)), values=(*(1.0,) * 57, 500.0, *(1.0,) * 42))
        drawn = stack_html(timeline_stack(Overview(steps=100, loss=curve), []))
        corners = _corners(drawn)
        top = min(corners, key=lambda corner: corner[1])
        assert top[0] == round(1000 * 57 / 99)
        assert 0 <= top[1] < 100
        assert {corners[0][1], corners[-1][1]} <= set(range(901, 1001))
        assert (corners[0][0], corners[-1][0]) == (0, 1000)
        assert len(corners) == 5, "a level stretch is one line"

    def test_a_value_that_cannot_be_drawn_is_marked_at_its_step(self) -> None:
        curve = Curve(steps=(0, 2, 10), values=(1.0, 2.0, 1.0), nonfinite=(5,), nonfinite_count=1)
        stack = timeline_stack(Overview(steps=11, loss=curve), [])
        assert stack.panels[0].pieces == [[(0, 1.0), (2, 2.0)], [(10, 1.0)]]
        drawn = stack_html(stack)
        assert drawn.count('class="curve"') == 2, "no line leads across a value that is not there"
        assert 'left:50.00%" title="step 5"' in drawn
        assert "NaN or infinite</span>" in drawn

    def test_a_single_step_is_a_dot(self) -> None:
        drawn = stack_html(timeline_stack(Overview(steps=1, loss=Curve(steps=(3,), values=(1.0,))), []))
        assert "amp-dot" in drawn

    def test_thousands_of_marks_are_lines_and_few_are_glyphs(self) -> None:
        def drawn(count: int) -> str:
            spans = tuple((step, step) for step in range(count))
            hovers = (("problem",),) * count
            lane = Lane(name="problem", symbol=Symbol.CROSS, color="#000000", spans=spans, hovers=hovers)
            return stack_html(Stack(label="marks", lanes=(lane,)))

        assert drawn(5).count("amp-glyph") == 5
        assert "amp-glyph" not in drawn(5000)
        assert drawn(5000).count("V850") > 500

    def test_the_step_that_was_asked_for_is_a_line_of_its_own(self) -> None:
        stack = timeline_stack(Overview(steps=2, loss=Curve(steps=(0, 1), values=(1.0, 2.0))), [])
        assert 'class="marked"' not in stack_html(stack)
        assert '<path class="marked" d="M1000 0V1000"/>' in stack_html(replace(stack, marked=1))
        assert "the line: step 1" in stack_html(replace(stack, marked=1))


def _left(match: re.Match[str] | None) -> float:
    assert match is not None
    return float(re.findall(r"left:([\d.]+)%", match[1])[0])


def _corners(drawn: str) -> list[tuple[int, int]]:
    """The corners of the curve, from the left."""
    match = re.search(r'class="curve" d="([^"]*)"', drawn)
    assert match is not None
    corners = []
    x = y = 0
    for move, numbers in re.findall(r"([Mlhv])([-\d ]+)", match[1]):
        first, *second = map(int, re.findall(r"-?\d+", numbers))
        x, y = {
            "M": (first, *second),
            "l": (x + first, y + sum(second)),
            "h": (x + first, y),
            "v": (x, y + first),
        }[move]
        corners.append((x, y))
    return corners


def _node(module: str, **facts: str) -> PathNode:
    told = {"op": "aten.add.Tensor", "name": "", "phase": "forward", "dtype": "float16", "shape": "8", **facts}
    return PathNode(seq=0, module=module, min=math.nan, max=math.nan, source=None, **told)


def _sink(op: str) -> PathNode:
    return replace(_node("b"), op=op, name="b.weight", phase="")


def _incident(*path: PathNode) -> Incident:
    return Incident(
        step=0,
        last_step=0,
        count=1,
        severity=Severity.ERROR,
        cause=Cause.FP16_OVERFLOW,
        phase="forward",
        op="aten.add.Tensor",
        module="",
        module_type="",
        source=None,
        path=path,
    )
