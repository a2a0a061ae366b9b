"""The loss scale and its growth tracker by step, with skipped steps and saved or loaded state below."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from ampscope.analysis.overview import Moment
from ampscope.analysis.scale import ScaleHistory
from ampscope.report.html.timeline import scale_stack
from charts.canvas import draw_stack


def scale_figure(history: ScaleHistory, moments: Sequence[Moment]) -> go.Figure:
    """The figure of a scaler's history."""
    return draw_stack(scale_stack(history, moments))
