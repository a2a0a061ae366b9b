"""What healing has changed, in the words of terminal, report and app."""

from __future__ import annotations

from ampscope.analysis.results import MadeCure

TITLE = "What was changed in this run"


def cure_in_words(cure: MadeCure) -> str:
    """One change, in a sentence that begins with its step."""
    lasts = f" from {'this' if cure.at_once else 'the next'} step on" if cure.code else ""
    applied = "; the step was made with the gradients of its replay" if cure.applied else ""
    lost = f"; the step itself is lost ({cure.lost})" if cure.lost else ""
    return f"Step {cure.step:,}: {cure.text}{lasts}{applied}{lost}{_end(cure)}."


def _end(cure: MadeCure) -> str:
    """What has become of one that lasts."""
    if cure.lifted_at is not None:
        return f"; lifted at step {cure.lifted_at:,}" + (f", for {cure.lifted_because}" if cure.lifted_because else "")
    return "; still in force" if cure.code else ""
