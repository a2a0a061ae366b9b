"""The catalogue says what each usage mistake is; a run says what was checked of its loop, and what came out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ampscope.analysis.causes import usage
from ampscope.analysis.causes.catalogue import CATALOGUE
from ampscope.analysis.causes.cause_entry import NOTHING_MORE, Occurrence, Reason
from ampscope.analysis.causes.outside import left_it_finite
from ampscope.analysis.causes.usage import UsageEntry, filled_in
from ampscope.analysis.causes.usage_forms import (
    CLIPPED_IN_FRAMEWORK,
    EDITED_IN_FRAMEWORK,
    FORMS,
    SCALED_IN_FRAMEWORK,
    UNSCALE_FIRST,
    FormEntry,
)
from ampscope.analysis.results import Diagnosis, Finding, Incident, Remedy, SourceLine
from ampscope.analysis.usage.loop_edits import diff_of
from ampscope.trace.schema import UNMEASURED
from ampscope.trace.vocabulary import Cause, MistakeForm, Severity

_NO_FORM = FormEntry()


def _form(form: MistakeForm | None) -> FormEntry:
    return FORMS[form] if form is not None else _NO_FORM


def happens_once(cause: Cause, form: MistakeForm | None) -> bool:
    """Whether a mistake is a single event; any other is a line of the loop, which comes round again."""
    entry = CATALOGUE[cause]
    return (isinstance(entry, UsageEntry) and entry.happens_once) or _form(form).refused


def severity(cause: Cause, form: MistakeForm | None) -> Severity:
    """Returns how severe a mistake is, in the form in which it was made."""
    return _form(form).severity or CATALOGUE[cause].severity


def explained(cause: Cause, form: MistakeForm | None, reason: Reason = NOTHING_MORE) -> str:
    """Explains a mistake, as exactly as it was seen."""
    return filled_in(_form(form).sentence, reason) or CATALOGUE[cause].explanation(Occurrence(reason=reason))


def fixes(
    cause: Cause,
    form: MistakeForm | None,
    source: SourceLine | None = None,
    framework: str = "",
    reason: Reason = NOTHING_MORE,
) -> tuple[Remedy, ...]:
    """Returns the remedies of a mistake, the first with a change of the loop that made it, where its file is at hand.

    Args:
        cause: The mistake.
        form: In which form it was made.
        source: The line that made it.
        framework: The one that unscales and steps for the user, empty where the loop does.
        reason: What was seen of it.
    """
    if (hook := _in_framework(cause, form).get(framework)) is not None:
        return (replace(hook, kind="usage"),)
    fix = _form(form).fix
    found = (fix,) if fix is not None else CATALOGUE[cause].advice(Occurrence(reason=reason))
    diff = diff_of(cause, form, source)
    return tuple(replace(each, kind="usage", diff=diff if each is found[0] else None) for each in found)


def _in_framework(cause: Cause, form: MistakeForm | None) -> dict[str, Remedy]:
    """Returns, by the framework that steps, the remedies where gradients are edited or losses scaled."""
    if form is MistakeForm.SCALED_TWICE:
        return SCALED_IN_FRAMEWORK
    if cause is Cause.MISUSE_CLIP_BEFORE_UNSCALE:
        return CLIPPED_IN_FRAMEWORK
    edits = _form(form).fix is UNSCALE_FIRST or form is MistakeForm.UNSCALED_FOR_ANOTHER
    return EDITED_IN_FRAMEWORK if edits or (cause is Cause.MISUSE_NO_UNSCALE and form is None) else {}


_GROWS_WITH_SCALE = explained(Cause.MISUSE_NO_UNSCALE, MistakeForm.LOSS_OF_SCALED_GRADIENTS)
_CASTS_AND_BACK = FORMS[MistakeForm.CAST_AND_BACK].sentence.partition("{")[0]
_STATE = frozenset({Cause.BAD_BUFFER, Cause.BAD_WEIGHT})

#: Causes of skipped steps by the scale alone.
_OF_SCALE = frozenset({Cause.SCALE_OVERFLOW, Cause.BENIGN_INITIAL_CALIBRATION, Cause.BENIGN_SCALE_ADJUSTMENT})


def of_mistakes(incidents: Iterable[Incident], mistakes: Sequence[Finding]) -> list[Incident]:
    """The incidents, with the mistake that made one so.

    Of a loss scale that is too large for a loss that grows with it, neither a smaller loss nor a smaller scale is the
    remedy, but the one of the mistake. State that a step found infinite has overflowed where a line cast the model to
    float16 and back since the step before. Steps that are skipped for what an earlier one has left in the gradients say
    nothing of the scale.
    """
    kept = min((each.step for each in mistakes if each.cause is Cause.MISUSE_GRADIENTS_KEPT), default=None)
    if kept is not None:
        incidents = [each for each in incidents if each.cause not in _OF_SCALE or each.last_step <= kept]
    growing = [each for each in mistakes if each.explanation.startswith(_GROWS_WITH_SCALE)]
    casts = [each for each in mistakes if each.explanation.startswith(_CASTS_AND_BACK)]
    narrowed = {each.step + 1: each for each in casts if " to float16," in each.explanation}  # bfloat16 holds more
    return [
        _of(each, growing)
        if each.cause is Cause.SCALE_OVERFLOW
        else _of_cast(each, narrowed.get(each.step))
        if each.cause in _STATE
        else each
        for each in incidents
    ]


def _of_cast(incident: Incident, mistake: Finding | None) -> Incident:
    """The incident, told by the line that cast the model since the step before left finite what is infinite now."""
    found = incident.outputs[0].statistics if incident.outputs else UNMEASURED
    is_infinite = bool((found.posinf or 0) + (found.neginf or 0)) and not found.nan
    left_finite = mistake is not None and left_it_finite(mistake.step) in incident.explanation
    if mistake is None or not (left_finite and is_infinite and incident.path):
        return incident
    why = (
        f"The {incident.path[0].op} {incident.path[0].name} was infinite when the step first read it. "
        f"{left_it_finite(mistake.step)}. After that this line casts the model to float16, which ends at 65,504: what "
        "is larger is infinite from then on, also when it is cast back."
    )
    return replace(incident, explanation=why, source=mistake.source, remedies=(*mistake.remedies, *incident.remedies))


def _of(incident: Incident, growing: Sequence[Finding]) -> Incident:
    mistake = next((each for each in growing if each.step <= incident.step), None)
    if mistake is None:
        return incident
    why = f"{incident.explanation} The loss itself was computed from gradients that were not unscaled."
    return replace(incident, explanation=why, remedies=mistake.remedies)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageCheck:
    """One thing that a correct loop does."""

    cause: Cause  #: what the mistake is called
    words: str  #: what a correct loop does, as a sentence without full stop
    found: int  #: places where this one does not
    noted: int  #: places where it does not, and that does not matter
    applies: bool  #: whether the run could show the mistake at all

    @property
    def passed(self) -> bool:
        """Whether the loop does it right, as far as the run can show."""
        return self.applies and not self.found and not self.noted


def usage_checks(diagnosis: Diagnosis) -> tuple[UsageCheck, ...]:
    """Every check of the use of autocast and the scaler, in the order of a step."""
    has_scaler = bool(diagnosis.scale)
    found = [each.cause for each in diagnosis.findings if each.severity is not Severity.INFO]
    noted = [each.cause for each in diagnosis.findings if each.severity is Severity.INFO]
    return tuple(
        UsageCheck(
            cause=entry.cause,
            words=entry.correct,
            found=found.count(entry.cause),
            noted=noted.count(entry.cause),
            applies=has_scaler or not entry.of_scaler or entry.cause in (*found, *noted),
        )
        for entry in usage.ENTRIES
    )
