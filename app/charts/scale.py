"""The loss scale and its growth tracker by step, with skipped steps and saved or loaded state below."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from ampscope.analysis.overview import Moment
from ampscope.analysis.scale import ScaleHistory
from charts.canvas import draw_lanes, stacked
from charts.panels import draw_counter, draw_scale
from charts.timeline import draw_lines, moment_lanes, skip_lane


def scale_figure(history: ScaleHistory, moments: Sequence[Moment]) -> go.Figure:
    """The figure of a scaler's history."""
    lanes = [*skip_lane(history.skips), *moment_lanes(moments)]
    has_tracker = not history.growth_tracker.is_empty
    figure = stacked(1 + has_tracker, len(lanes), steps=history.steps)
    draw_scale(figure, 1, history.log2_scale)
    if has_tracker:
        draw_counter(figure, 2, history.growth_tracker, "growth tracker", target=history.settings.growth_interval)
    if lanes:
        draw_lanes(figure, 2 + has_tracker, lanes)
    draw_lines(figure, moments)
    return figure
