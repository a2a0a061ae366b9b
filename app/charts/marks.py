"""What is marked in a figure over steps because the reader came for it."""

from __future__ import annotations

import plotly.graph_objects as go

from ampscope.report.html.palette import MARK


def mark_step(figure: go.Figure, step: int) -> None:
    """A line through all panels at ``step``, with its number at the top."""
    line = {"color": MARK, "width": 1.5}
    figure.add_shape(type="line", xref="x", yref="paper", x0=step, x1=step, y0=0, y1=1, line=line, layer="below")
    figure.add_annotation(
        x=step,
        xref="x",
        y=1,
        yref="paper",
        text=f"step {step:,}",
        showarrow=False,
        xanchor="right",
        yanchor="bottom",
        font={"size": 11},
    )
