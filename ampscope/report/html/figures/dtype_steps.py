"""The key of the figure of dtypes by step: what its colours mean, and its marks."""

from __future__ import annotations

from ampscope.report.figures.dtype_steps import DtypeSteps
from ampscope.report.html.markup import as_html


def dtype_steps_key(figure: DtypeSteps) -> str:
    """The colours of the dtypes and, where there are any, the marks."""
    named = "".join(
        f'<span><i style="background:{layer.color}"></i>{as_html(layer.dtype, 24)}</span>' for layer in figure.layers
    )
    marks = "<span>\N{BLACK DOWN-POINTING TRIANGLE} a module went over to another dtype</span>" if figure.marks else ""
    return (
        f'<div class="amp-matrix-key">{named}{marks}<span class="amp-hint">Click a column to see its step.</span></div>'
    )
