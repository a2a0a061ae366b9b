"""What healing has changed, in the words of terminal, report and app."""

from __future__ import annotations

from ampscope.analysis.results import MadeCure

TITLE = "What was changed in this run"


def cure_in_words(cure: MadeCure) -> str:
    """One change, in a sentence that begins with its step."""
    lasts = " from the next step on" if cure.code else ""
    applied = "; the step was made with the gradients of its replay" if cure.applied else ""
    lifted = f"; lifted at step {cure.lifted_at:,}" if cure.lifted_at is not None else ""
    return f"Step {cure.step:,}: {cure.text}{lasts}{applied}{lifted}."
