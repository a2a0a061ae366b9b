"""What the ops of a traced step ran in: a sentence and the bars."""

from __future__ import annotations

from ampscope.analysis.precision.precision import Precision
from ampscope.report.figures.precision_bars import step_bars
from ampscope.report.html.figures.share_bars import share_bars_html
from ampscope.report.html.markup import as_html


def precision_html(seen: Precision) -> str:
    """The bars under a sentence; empty where no step was traced."""
    if seen.step is None or not seen.modules:
        return ""
    regions = " and ".join(seen.autocast)
    autocast = f"Autocast was on, in {regions}." if regions else "Autocast was off."
    return f"<p>{as_html(f'Step {seen.step:,}. {autocast}')}</p>{share_bars_html(step_bars(seen))}"
