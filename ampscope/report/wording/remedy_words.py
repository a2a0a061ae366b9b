"""How far a remedy is known to help, and what it costs."""

from __future__ import annotations

from ampscope.analysis.results import Cost, Remedy
from ampscope.analysis.words import trial_in_words
from ampscope.report import numbers


def remedy_in_words(remedy: Remedy) -> str:
    """Whether a replay tried it and what came out: ``tried on this step: cures it; +0.4% of the step, +3 MiB``."""
    if remedy.verified is None:
        return f"not tried: {remedy.untried}"
    parts = [trial_in_words(remedy.verified, remedy.kind)]
    if remedy.verified and remedy.changes_good_values:
        parts.append("changes values that were good")
    if remedy.verified and remedy.cost is not None:
        parts.append(cost_in_words(remedy.cost))
    return "; ".join(filter(None, parts))


def cost_in_words(cost: Cost) -> str:
    """What a change adds to the step; empty where nothing was measured, and no more is written."""
    time = (
        "" if cost.time is None else f"+{numbers.share(cost.time)} of the step" if cost.time else "no measurable time"
    )
    memory = f"+{numbers.size(cost.bytes)}" if cost.bytes and cost.bytes > 0 else ""
    return ", ".join(filter(None, (time, memory)))
