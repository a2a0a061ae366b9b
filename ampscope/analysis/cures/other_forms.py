"""Forms of a call that replays have tried, as advice: in words, as code, and as what the line becomes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf

from ampscope.analysis import words
from ampscope.analysis.cures import own_words
from ampscope.analysis.cures.own_words import asked_of
from ampscope.analysis.results import Cost, FormTried, Remedy, Tried
from ampscope.cures.call_form import ROUNDING
from ampscope.cures.catalogue import cure_form
from ampscope.cures.forms.whole_step import OF_GROWTH, OF_OPTIMIZERS
from ampscope.trace.schema import Change, Trial

#: The replays of one form, with one loss scale.
_Group = list[tuple[FormTried, Tried]]


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
        forms = [(cure_form(each.form), asked_of(each)) for each in parts]
        alone = " The first alone only moves the failure to the second." if form.beside is not None else ""
        yield Remedy(
            text=f"{' '.join(told.sentence(asked) for told, asked in forms).removesuffix('.')}{scale}.{alone}",
            code="\n".join(filter(None, (*(told.code(asked) for told, asked in forms), start))),
            verified=cures,
            kind=form.form,
            cost=cost([each for _, each in found]),
            diff=own_words.of_forms(parts) if cures else None,  # a scaler comes down to a scale by itself
            changes_good_values=_changes_good_values([*parts, *(form for form, _ in found)]),
        )


def _each_once(groups: Iterable[_Group], tried: Sequence[Tried]) -> list[_Group]:
    """Keeps, of a form that cures with several loss scales, the largest scale alone: a scaler finds smaller ones."""
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
    return f", and a loss scale of {words.in_words(form.scale or 0.0)}" if other else ""


def in_words(form: FormTried) -> str:
    """States what a replay did, to come after ``with``: ``the operand of log bounded from below by 6.104e-05``."""
    beside = f"{in_words(form.beside)} and " if form.beside is not None else ""
    return beside + cure_form(form.form).tried(asked_of(form))


def are_of_optimizer(tried: Sequence[Tried]) -> bool:
    """Whether the optimizer's step alone was run again."""
    return bool(tried) and all(each.form is not None and each.form.form in OF_OPTIMIZERS for each in tried)


def is_of_growth(tried: Tried) -> bool:
    """Whether it was tried on a step whose loss had just grown."""
    return tried.form is not None and tried.form.form in OF_GROWTH


def cost(tried: Sequence[Tried]) -> Cost | None:
    """Returns the cost of one change, by the first of its replays that measured it; None where none did."""
    time = next((each.extra_time for each in tried if each.extra_time is not None), None)
    memory = next((each.extra_bytes for each in tried if each.extra_bytes is not None), None)
    return Cost(time=time, bytes=memory) if time is not None or memory is not None else None


def _changes_good_values(forms: Sequence[FormTried]) -> bool | None:
    """Whether values that were good are others; None where it was not measured, or is so on other steps only."""
    known = [form.good_change for form in forms if form.good_change is not None]
    changes = max(known) > ROUNDING if known else None
    depends = any(cure_form(form.form).depends and form.was is not None for form in forms)
    return None if depends and not changes else changes
