"""The loss scale and its growth tracker by step, as they were and as they would have been with other settings."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from ampscope.analysis.numerics.curve import Curve
from ampscope.analysis.overview.overview import Moment
from ampscope.analysis.scale.scale_history import ScaleHistory
from ampscope.analysis.scale.what_if import WhatIf
from ampscope.report.html.figures.timeline import scale_stack, what_if_stack
from charts.canvas import draw_stack


def scale_figure(history: ScaleHistory, moments: Sequence[Moment], lr: Curve) -> go.Figure:
    """The figure of a scaler's history; the learning rate is drawn where it changes."""
    return draw_stack(scale_stack(history, moments, lr))


def what_if_figure(answer: WhatIf, history: ScaleHistory) -> go.Figure:
    """The scale as it was above the scale as it would have been."""
    return draw_stack(what_if_stack(answer, history))
