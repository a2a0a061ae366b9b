"""The figures of a run under the names they have in a framework's log."""

from __future__ import annotations

from ampscope.capture.record.live_figures import LiveFigures


def logged(figures: LiveFigures) -> dict[str, float]:
    """``ampscope/scale`` and the others, without those that this run does not have."""
    known = {
        "ampscope/scale": figures.scale,
        "ampscope/skipped_share": figures.skipped_share,
        "ampscope/observing_share": figures.observing_share,
    }
    return {name: value for name, value in known.items() if value is not None}
