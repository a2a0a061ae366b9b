"""What a mistake in the use of the scaler does to the incidents after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ampscope.analysis.results import Finding, Incident
from ampscope.analysis.usage.mistakes import explained
from ampscope.trace.vocabulary import Cause, MistakeForm

_GROWS_WITH_SCALE = explained(Cause.MISUSE_NO_UNSCALE, MistakeForm.LOSS_OF_SCALED_GRADIENTS)


def of_mistakes(incidents: Iterable[Incident], mistakes: Sequence[Finding]) -> list[Incident]:
    """The incidents; a loss scale that is too large for a loss that grows with it, with the mistake that makes it so.

    Neither a smaller loss nor a smaller scale is the remedy there, but the one of the mistake.
    """
    growing = [each for each in mistakes if each.explanation == _GROWS_WITH_SCALE]
    return [_of(each, growing) if each.cause is Cause.SCALE_OVERFLOW else each for each in incidents]


def _of(incident: Incident, growing: Sequence[Finding]) -> Incident:
    mistake = next((each for each in growing if each.step <= incident.step), None)
    if mistake is None:
        return incident
    why = f"{incident.explanation} The loss itself was computed from gradients that were not unscaled."
    return replace(incident, explanation=why, remedies=mistake.remedies)
