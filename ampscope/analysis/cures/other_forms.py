"""Other forms of the failed call that replays tried, in words and as remedies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf

from ampscope.analysis.cures import own_words
from ampscope.analysis.cures.form_texts import mathematics, optimizer
from ampscope.analysis.cures.form_texts import range as in_range
from ampscope.analysis.cures.form_texts.form_text import FormText
from ampscope.analysis.results import Cost, FormTried, Remedy, Tried
from ampscope.analysis.words import scale_words
from ampscope.trace.schema import Change, Form, Trial

#: The replays of one form, with one loss scale.
_Group = list[tuple[FormTried, Tried]]
#: Units of a dtype's eps up to which another value is the same one, rounded elsewhere.
ROUNDING = 4.0


def remedies(tried: Sequence[Tried]) -> Iterator[Remedy]:
    """The forms that were tried, as advice: what cured every step on which it was tried, and what did not help."""
    by_words: dict[str, _Group] = {}
    for each in tried:
        if each.change == Change.FORM and each.form is not None and each.outcome != Trial.UNAVAILABLE:
            by_words.setdefault(in_words(each.form) + with_scale(each, tried), []).append((each.form, each))
    for found in _each_once(by_words.values(), tried):
        form, first = found[0]
        cures = all(each.outcome == Trial.FINITE for _, each in found)
        scale = with_scale(first, tried)
        start = f"scaler = torch.amp.GradScaler(init_scale={first.scale!r})" if scale else ""
        parts = [each for each in (form.beside, form) if each is not None]
        alone = " The first alone only moves the failure to the second." if form.beside is not None else ""
        yield Remedy(
            text=f"{' '.join(map(_sentence, parts)).removesuffix('.')}{scale}.{alone}",
            code="\n".join(filter(None, (*(_text(each).code(each) for each in parts), start))),
            verified=cures,
            kind=form.form,
            cost=cost([each for _, each in found]),
            diff=own_words.of_forms(parts) if cures else None,  # a scaler comes down to a scale by itself
            changes_good_values=_changes_good_values([*parts, *(form for form, _ in found)]),
        )


def _each_once(groups: Iterable[_Group], tried: Sequence[Tried]) -> list[_Group]:
    """Of one form that cures with several loss scales, that with the largest alone: a scaler finds smaller ones."""
    cures: dict[str, list[_Group]] = {}
    told: list[_Group] = []
    for found in groups:
        told.append(found)
        if all(each.outcome == Trial.FINITE for _, each in found):
            cures.setdefault(in_words(found[0][0]), []).append(found)
    best = [max(alike, key=lambda found: _scale(found, tried)) for alike in cures.values()]
    return [found for found in told if found in best or any(each.outcome != Trial.FINITE for _, each in found)]


def _scale(found: _Group, tried: Sequence[Tried]) -> float:
    """The loss scale that a form was tried with; infinite where it needs no other than the step's."""
    first = found[0][1]
    return (first.scale or 0.0) if with_scale(first, tried) else inf


def with_scale(form: Tried, tried: Sequence[Tried]) -> str:
    """The loss scale that a form was tried with, with ``and`` before it; empty for that of the step."""
    others = [each.scale for each in tried if each.step == form.step and each.change not in (Change.FORM, Change.SCALE)]
    other = form.scale is not None and bool(others) and form.scale not in others
    return f", and a loss scale of {scale_words.in_words(form.scale or 0.0)}" if other else ""


def in_words(form: FormTried) -> str:
    """What a replay did, after ``with``: ``the operand of log bounded from below by 6.104e-05``."""
    beside = f"{_text(form.beside).tried(form.beside)} and " if form.beside is not None else ""
    return beside + _text(form).tried(form)


def are_of_optimizer(tried: Sequence[Tried]) -> bool:
    """Whether the optimizer's step alone was run again."""
    return bool(tried) and all(each.form is not None and each.form.form in optimizer.TEXTS for each in tried)


def is_of_growth(tried: Tried) -> bool:
    """Whether it was tried on a step whose loss had just grown."""
    return tried.form is not None and tried.form.form in optimizer.OF_GROWTH


def cost(tried: Sequence[Tried]) -> Cost | None:
    """What one change costs, by the first of its replays in which that was measured; None where it was in none."""
    time = next((each.extra_time for each in tried if each.extra_time is not None), None)
    memory = next((each.extra_bytes for each in tried if each.extra_bytes is not None), None)
    return Cost(time=time, bytes=memory) if time is not None or memory is not None else None


def _changes_good_values(forms: Sequence[FormTried]) -> bool | None:
    """Whether values that were good are others; None where it was not measured, or is so on other steps only."""
    known = [form.good_change for form in forms if form.good_change is not None]
    changes = max(known) > ROUNDING if known else None
    depends = any(form.form == Form.MAX_OFF and form.was is not None for form in forms)
    return None if depends and not changes else changes


# -- in words ---------------------------------------------------------------------------------------------------------

_UNKNOWN = FormText(
    lambda form: f"another form of {form.call or 'a call'}",
    lambda form: f"Give {form.call or 'the call'} another form.",
)
_TEXTS: dict[str, FormText] = {**mathematics.TEXTS, **in_range.TEXTS, **optimizer.TEXTS}


def _sentence(form: FormTried) -> str:
    return _text(form).sentence(form)


def _text(form: FormTried) -> FormText:
    """How a form is told; one that a later version has recorded, in general words."""
    return _TEXTS.get(form.form, _UNKNOWN)
