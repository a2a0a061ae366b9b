"""A run's time line: loss, gradient norm, loss scale and learning rate in panels, what happened in lanes below."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from ampscope.analysis.overview.overview import Overview
from ampscope.analysis.results import Finding, Incident
from ampscope.report.html.figures.timeline import timeline_stack
from charts.canvas import draw_stack


def timeline(seen: Overview, items: Sequence[Incident | Finding]) -> go.Figure:
    """The figure of a run's steps."""
    return draw_stack(timeline_stack(seen, items))
