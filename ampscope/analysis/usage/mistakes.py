"""The catalogue of causes says what each usage mistake is, and each does something to the incidents after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ampscope.analysis.causes.catalogue import CATALOGUE
from ampscope.analysis.causes.cause_entry import NOTHING_MORE, Occurrence, Reason
from ampscope.analysis.causes.usage import UsageEntry, filled_in
from ampscope.analysis.causes.usage_forms import (
    CLIPPED_IN_FRAMEWORK,
    EDITED_IN_FRAMEWORK,
    FORMS,
    SCALED_IN_FRAMEWORK,
    UNSCALE_FIRST,
    FormEntry,
)
from ampscope.analysis.results import Finding, Incident, Remedy, SourceLine
from ampscope.analysis.usage.loop_edits import diff_of
from ampscope.trace.vocabulary import Cause, MistakeForm

_NO_FORM = FormEntry()


def _form(form: MistakeForm | None) -> FormEntry:
    return FORMS[form] if form is not None else _NO_FORM


def happens_once(cause: Cause, form: MistakeForm | None) -> bool:
    """Whether a mistake is a single event; any other is a line of the loop, which comes round again."""
    entry = CATALOGUE[cause]
    return (isinstance(entry, UsageEntry) and entry.happens_once) or _form(form).refused


def explained(cause: Cause, form: MistakeForm | None, reason: Reason = NOTHING_MORE) -> str:
    """What is wrong about it, as exactly as it was seen."""
    return filled_in(_form(form).sentence, reason) or CATALOGUE[cause].explanation(Occurrence(reason=reason))


def fixes(
    cause: Cause, form: MistakeForm | None, source: SourceLine | None = None, framework: str = ""
) -> tuple[Remedy, ...]:
    """What to write instead; the first as a change of the loop that made the mistake, where its file is at hand.

    Args:
        cause: The mistake.
        form: In which form it was made.
        source: The line that made it.
        framework: The one that unscales and steps for the user, empty where the loop does.
    """
    if (hook := _in_framework(cause, form).get(framework)) is not None:
        return (replace(hook, kind="usage"),)
    fix = _form(form).fix
    found = (fix,) if fix is not None else CATALOGUE[cause].advice(Occurrence())
    diff = diff_of(cause, form, source)
    return tuple(replace(each, kind="usage", diff=diff if each is found[0] else None) for each in found)


def _in_framework(cause: Cause, form: MistakeForm | None) -> dict[str, Remedy]:
    """Where gradients are edited or losses scaled, by the framework that steps."""
    if form is MistakeForm.SCALED_TWICE:
        return SCALED_IN_FRAMEWORK
    if cause is Cause.MISUSE_CLIP_BEFORE_UNSCALE:
        return CLIPPED_IN_FRAMEWORK
    edits = _form(form).fix is UNSCALE_FIRST or form is MistakeForm.UNSCALED_FOR_ANOTHER
    return EDITED_IN_FRAMEWORK if edits or (cause is Cause.MISUSE_NO_UNSCALE and form is None) else {}


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
