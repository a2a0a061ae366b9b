"""The replays of an incident are told in words, and made of the rows that a run has of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from ampscope.analysis import words
from ampscope.analysis.causes.catalogue import CATALOGUE
from ampscope.analysis.cures import other_forms
from ampscope.analysis.cures.other_forms import is_of_growth
from ampscope.analysis.results import CodeLine, FormTried, Incident, SourceLine, Tried
from ampscope.analysis.words import capitalized, listed, op_in_words
from ampscope.numerals import number
from ampscope.trace.read.run import Run
from ampscope.trace.schema import LOSS_CODE, Change, ReplayRow, Table, Trial, Trigger
from ampscope.trace.vocabulary import LOSS_APART, TOGETHER, Cause


def by_precision(cause: Cause, tried: Sequence[Tried]) -> bool:
    """Whether a failure is one of precision: by its cause, unless float32 was tried in vain, or by that trial."""
    cured, by_nature = fp32_ok(tried), CATALOGUE[cause].cured_by_precision
    return bool(by_nature) if cured is None else cured and by_nature is not False


def fp32_ok(tried: Sequence[Tried]) -> bool | None:
    """Whether the step is finite in float32, each time; None where that was not tried or could not be run."""
    failed, cured = came_out(tried, Change.FP32, Trial.NONFINITE), came_out(tried, Change.FP32, Trial.FINITE)
    return not failed if failed or cured else None


def in_words(incident: Incident) -> str:
    """One sentence on what was tried on an incident and what came out; empty where nothing was."""
    all_tried, op = incident.tried, op_in_words(incident.op)
    if incident.trigger == Trigger.LOST_GRADIENT:
        return _kept_in_words(all_tried)
    if incident.trigger == Trigger.ABSORBED_OVERFLOW:
        return _agreed_in_words(all_tried)
    grew = [each for each in all_tried if other_forms.is_of_growth(each)]
    tried = [each for each in all_tried if each not in grew]
    fails = list(dict.fromkeys(_did(each, tried) for each in tried if each.outcome == Trial.NONFINITE))
    finite = [each for each in reversed(tried) if each.outcome == Trial.FINITE]
    values = {_did(each, tried): f"{_value(each, op)}{_missed(each, tried)}" for each in finite}
    later = {_did(each, tried): each.followed for each in sorted(tried, key=lambda each: each.followed)}
    told = reversed(values.items())
    cures = [f"{change}{value}{_later(later[change])}" for change, value in told if change not in fails]
    parts = [*(f"finite {cure}" for cure in cures), *(f"still not finite {fail}" for fail in fails)]
    doubts = dict.fromkeys(each.reason for each in tried if each.change == Change.NONE and each.reason)
    again = f"Run again, {_what(tried)} is {', '.join(parts)}." if parts else ""
    return " ".join(filter(None, [again, *(f"{capitalized(doubt)}." for doubt in doubts), _lowered_in_words(grew)]))


def _lowered_in_words(tried: Sequence[Tried]) -> str:
    """The same of a step before, whose loss had just grown and which did not lower the loss of its own batch."""
    lowers = list(dict.fromkeys(_changed(each) for each in tried if each.outcome == Trial.FINITE))
    not_so = list(dict.fromkeys(_changed(each) for each in tried if each.outcome == Trial.NONFINITE))
    told = f"lowers the loss of its own batch {listed(lowers)}, and does not as it was" if lowers else ""
    vain = f"does not lower the loss of its own batch {listed(not_so)} either" if not_so else ""
    parts = [each for each in (told, vain) if each]
    return f"Step {tried[0].step:,}, whose loss had grown, {'; it '.join(parts)}." if parts else ""


def _what(tried: Sequence[Tried]) -> str:
    return "the optimizer's step alone" if other_forms.are_of_optimizer(tried) else "the step"


def _kept_in_words(tried: Sequence[Tried]) -> str:
    """The same of a step that was finite all along, and lost gradients."""
    loses = list(dict.fromkeys(_changed(each) for each in tried if each.outcome == Trial.NONFINITE))
    found = dict.fromkeys(_changed(each) for each in tried if each.outcome == Trial.FINITE)
    keeps = [change for change in found if change not in loses]
    told = {"keeps its gradients": keeps, "still loses them" if keeps else "still loses its gradients": loses}
    parts = [f"{what} {', '.join(changes)}" for what, changes in told.items() if changes]
    return f"Run again, the step {', and '.join(parts)}." if parts else ""


def _agreed_in_words(tried: Sequence[Tried]) -> str:
    """The same of a step that was finite all along, in which an overflow was hidden; of float32 the incident tells."""
    told: dict[str, str] = {Trial.FINITE: "agrees with float32", Trial.NONFINITE: "does not agree with float32"}
    outcomes = {_changed(each): told.get(each.outcome) for each in tried if each.change != Change.FP32}
    parts = [f"{change} {what}" for change, what in outcomes.items() if what]
    return f"Run again, the step {', and '.join(parts)}." if parts else ""


def _later(steps: int) -> str:
    return f" (on {steps} later step{'s' * (steps > 1)} too)" if steps else ""


def _did(each: Tried, tried: Sequence[Tried]) -> str:
    """All that a replay did otherwise, in words."""
    return f"{_changed(each)}{other_forms.with_scale(each, tried)}"


def _changed(tried: Tried) -> str:
    if tried.change == Change.SCALE:
        return f"with a loss scale of {words.in_words(tried.scale or 0.0)}"
    if tried.form is not None:
        return f"with {other_forms.in_words(tried.form)}"
    if tried.change == Change.MODULES_FP32:
        too = " and where the code itself converts to half precision" if tried.conversions else ""
        return f"with {modules_in_words(tried.modules)} in float32{too}"
    return next((words for change, words in _IN_WORDS.items() if change == tried.change), "unchanged")


_IN_WORDS = {
    Change.FP32: "in float32",
    Change.BF16: "in bfloat16",
    Change.CONVERSIONS: "with float32 where the code itself converts to half precision",
}


def _value(tried: Tried, op: str) -> str:
    """The value that the op at the origin gives in float32, beside the one that went wrong."""
    ends = [abs(end) for end in (tried.op_min, tried.op_max) if end is not None]
    if tried.change != Change.FP32 or not ends or not op:
        return ""
    return f" (where {op} gives magnitudes up to {number(max(ends))})"


def _missed(tried: Tried, all_tried: Sequence[Tried]) -> str:
    """Says that a replay with a part in float32 has another loss than float32 altogether; empty where it has not."""
    loss = misses_float32(tried, all_tried)
    if loss is None:
        return ""
    return f" (but with a loss of {number(tried.loss or 0.0)}, where float32 gives {number(loss)})"


def modules_in_words(modules: Sequence[str]) -> str:
    """``attn and the loss code``."""
    names = {LOSS_CODE: "the loss code", "": "the model itself"}
    return listed([names.get(name, name) for name in modules])


def came_out(tried: Sequence[Tried], change: Change, outcome: Trial) -> list[Tried]:
    """The replays with a change that came out so; what cured one step and not another has not cured.

    Neither has a part in float32 with which the step is finite, and has another loss than all of it in float32: what
    went out of range is swallowed somewhere then.
    """
    missed = [each for each in tried if misses_float32(each, tried) is not None]
    failed = [_changed(each) for each in (*(each for each in tried if each.outcome == Trial.NONFINITE), *missed)]
    found = [each for each in tried if each.change == change]
    if outcome == Trial.NONFINITE:
        return [each for each in found if each.outcome == outcome or each in missed]
    found = [each for each in found if each.outcome == outcome]
    return [each for each in found if outcome != Trial.FINITE or _changed(each) not in failed]


def misses_float32(tried: Tried, all_tried: Sequence[Tried]) -> float | None:
    """The loss of a step in float32, where a replay with a part of it in float32 is finite and far from that."""
    if tried.change not in (Change.MODULES_FP32, Change.CONVERSIONS) or tried.outcome != Trial.FINITE:
        return None
    whole = [each for each in all_tried if each.change == Change.FP32 and each.outcome == Trial.FINITE]
    losses = [each.loss for each in whole if each.step == tried.step and each.loss is not None]
    if tried.loss is None or not losses or not isfinite(losses[0]):
        return None
    apart = abs(tried.loss - losses[0]) > LOSS_APART * max(abs(tried.loss), abs(losses[0]))
    return losses[0] if apart else None


#: Steps from a loss that has grown to the failure that it leads to.
_REACH = 50


def of_run(run: Run, rank: int) -> dict[tuple[int, int], tuple[Tried, ...]]:
    """Returns the changes that replays have tried on each incident, by step and optimizer."""
    found: dict[tuple[int, int], tuple[Tried, ...]] = {}
    for row in run.rows(Table.REPLAYS, rank=rank):
        key = (row.step, row.optimizer)
        tried = Tried(
            step=row.step,
            change=row.change,
            modules=tuple(row.modules),
            scale=row.scale,
            outcome=row.outcome,
            reason=row.reason,
            loss=row.loss,
            seconds=row.seconds,
            op_min=row.op_min,
            op_max=row.op_max,
            conversions=_conversion_lines(row),
            form=_form(row, found.get(key, ())),
            extra_time=row.extra_time,
            extra_bytes=row.extra_bytes,
            followed=row.followed or 0,
        )
        found[key] = (*found.get(key, ()), tried)
    return found


def of_growing_loss(tried: Mapping[tuple[int, int], tuple[Tried, ...]], step: int, optimizer: int) -> tuple[Tried, ...]:
    """Returns what was tried on the latest step before one whose loss had just grown by far; nothing where none was.

    Args:
        tried: What was tried, by step and optimizer.
        step: The one that went bad.
        optimizer: Its optimizer.
    """
    before = sorted((each for each in tried if each[1] == optimizer and 0 < step - each[0] <= _REACH), reverse=True)
    looked = (tried[each] for each in before)
    return next((found for found in looked if any(is_of_growth(each) for each in found)), ())


def _form(row: ReplayRow, before: Sequence[Tried]) -> FormTried | None:
    """The form of a replay.

    Args:
        row: The replay.
        before: Those before it on the step.
    """
    if row.form is None:
        return None
    alone = [each.form for each in before if each.form is not None and each.form.beside is None]
    place = None
    if row.form_file:
        place = SourceLine(
            file=row.form_file,
            line=row.form_line or 0,
            function=row.form_function or "",
            code=row.form_code or "",
        )
    return FormTried(
        form=row.form,
        call=row.form_call or "",
        source=place,
        argument=row.form_argument,
        value=row.form_value,
        was=row.form_was,
        good_change=row.good_change,
        beside=alone[-1] if alone and row.reason == TOGETHER else None,
    )


def _conversion_lines(row: ReplayRow) -> tuple[CodeLine, ...] | None:
    if row.conversion_files is None:
        return None
    return tuple(map(CodeLine, row.conversion_files, row.conversion_lines or (), row.conversion_codes or ()))
