"""The figures over steps before they are drawn: what is in them, and on which axes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ampscope.analysis.arrays import Curve
from ampscope.analysis.overview.overview import GroupCurve, Milestone, Overview
from ampscope.analysis.scale.scale_history import ScaleHistory
from ampscope.analysis.scale.what_if import ScalerRules, WhatIf
from ampscope.report.diagnosis_words import clipped_norm
from ampscope.report.figures.axis import measure_axis, round_ticks
from ampscope.report.figures.stack import counter_panel, measure_panel, scale_panel
from ampscope.report.figures.step_figures import scale_stack, timeline_stack, what_if_stack
from ampscope.report.html.stack_svg import stack_html
from ampscope.trace.schema import ScalerAction
from tests.support.verdicts.by_hand import CALIBRATION, OVERFLOW


def test_a_learning_rate_that_never_moves_says_nothing() -> None:
    flat, falling = (Curve(steps=(0, 1), values=values) for values in ((0.1, 0.1), (0.1, 0.05)))
    assert timeline_stack(Overview(steps=2, lr=flat), []).panels == ()
    assert [panel.name for panel in timeline_stack(Overview(steps=2, lr=falling), []).panels] == ["learning rate"]


def test_gradients_that_only_the_scales_search_made_infinite_are_no_alarm() -> None:
    norm = Curve(steps=(2,), values=(1.0,), nonfinite=(3, 294), nonfinite_count=2)
    seen = Overview(steps=300, grad_norm=norm)
    of_both = timeline_stack(seen, [CALIBRATION, OVERFLOW]).panels[0].above
    assert of_both.steps == (3, 294)
    assert of_both.harmless == {3}
    assert not of_both.is_calm
    during_it = replace(CALIBRATION, step=0, last_step=299)
    assert timeline_stack(seen, [during_it, OVERFLOW]).panels[0].above.harmless == {3}
    assert timeline_stack(seen, [during_it]).panels[0].above.is_calm


def test_a_problem_of_a_few_steps_is_no_bar_over_all_between() -> None:
    often, seldom = replace(OVERFLOW, step=3, last_step=5, count=3), replace(OVERFLOW, step=10, last_step=90, count=3)
    (lane,) = timeline_stack(Overview(steps=100), [often, seldom]).lanes
    assert lane.sparse == {1}
    assert '<path class="mark some"' in stack_html(timeline_stack(Overview(steps=100), [often, seldom]))
    assert '<path class="mark some"' not in stack_html(timeline_stack(Overview(steps=100), [often]))


def test_a_group_whose_rate_moves_has_a_panel_of_its_own() -> None:
    flat, falling = (Curve(steps=(0, 1), values=values) for values in ((0.1, 0.1), (0.1, 0.05)))
    groups = (GroupCurve(group="head", lr=falling), GroupCurve(group="2", lr=flat))
    names = [panel.name for panel in timeline_stack(Overview(steps=2, lr=falling, group_lrs=groups), []).panels]
    assert names == ["learning rate", "learning rate of group head"]
    of_scale = scale_stack(ScaleHistory(), (), falling, groups=groups).panels
    assert [panel.name for panel in of_scale] == ["loss scale", *names]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [(0.0, 0.0), (5.0, 5.0), (-3.0, 1e30), (1e-30, 1e30), (5e-324, 1e-323), (0.0, 1.0)])
def test_a_measure_of_any_extent_has_labels_on_its_axis(values: tuple[float, ...], log: bool) -> None:
    axis = measure_panel(Curve(steps=(0, 1), values=values), "loss", "", log=log).axis
    assert len(axis.ticks) == len(axis.labels) <= 10
    assert all(-1e-9 <= axis.place(tick) <= 1 + 1e-9 for tick in axis.ticks)


def test_a_value_says_what_it_is() -> None:
    assert measure_panel(Curve(), "loss", "").hover(math.pi) == "loss 3.142"
    assert scale_panel(Curve()).hover(13.0) == "loss scale 8,192 (2¹³)"
    assert counter_panel(Curve(), "growth tracker").hover(1999.0) == "growth tracker 1,999"


def test_a_counters_target_is_drawn_where_it_is_near() -> None:
    near, far = (counter_panel(Curve(steps=(0,), values=(100.0,)), "x", target=target) for target in (300.0, 3000.0))
    assert (near.target, near.target_words) == (300.0, "grows at 300")
    assert far.target is None


def test_what_was_and_what_would_have_been_stand_on_one_axis() -> None:
    was, would = (Curve(steps=(0, 1), values=values) for values in ((3.0, 4.0), (-9.0, 20.0)))
    stack = what_if_stack(WhatIf(rules=ScalerRules(), log2_scale=would, skips=(1,)), ScaleHistory(log2_scale=was))
    (panel,) = stack.panels
    assert (panel.curve, panel.other) == (was, would)
    assert panel.axis.low < -9 < 20 < panel.axis.high
    assert [lane.name for lane in stack.lanes] == ["would be"]


def test_gradients_clipped_while_scaled_have_one_norm_far_below_the_threshold() -> None:
    scale = Curve(steps=(0, 1), values=(16.0, 16.0))
    flat = Overview(grad_norm=Curve(steps=(0, 1), values=(1.525e-5, 1.526e-5)), log2_scale=scale)
    assert "1.526e-5, which is 1 divided by the loss scale of 65,536" in clipped_norm(flat, 0)
    assert clipped_norm(replace(flat, grad_norm=Curve(steps=(0, 1), values=(1e-5, 2e-5))), 0) == ""
    assert clipped_norm(Overview(), 0) == ""


def test_a_flat_curve_on_a_logarithmic_axis_has_round_labels() -> None:
    axis = measure_axis([1.525e-5, 1.525e-5], log=True, crowded=False)
    assert axis.labels == ("1.5e-5", "1.55e-5")


def test_a_step_with_a_mark_is_on_the_axis() -> None:
    moments = [Milestone(step=90, kind=ScalerAction.STATE_SAVED, text="")]
    history = ScaleHistory(steps=2, log2_scale=Curve(steps=(10, 11), values=(3.0, 4.0)))
    stack = scale_stack(history, moments, marked=11)
    assert (stack.axis.low, stack.axis.high, stack.marked) == (10, 90, 11)
    assert [lane.name for lane in stack.lanes] == ["state saved"]
    assert stack.lines == (90,)


@pytest.mark.parametrize("bounds", [(0, 299), (0, 1), (3, 3), (0.1, 0.9), (-5, 1e9), (1e-9, 2e-9)])
def test_ticks_are_few_and_inside(bounds: tuple[float, float]) -> None:
    ticks = round_ticks(*bounds, 6)
    assert 1 <= len(ticks) <= 8
    assert all(bounds[0] - 1e-12 <= tick <= bounds[1] * (1 + 1e-9) for tick in ticks)
