"""Whether a failure has gone from a training that was run again with a remedy in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ampscope.analysis.arrays import FloatArray
from ampscope.analysis.causes.catalogue import item_in_words
from ampscope.analysis.diagnosis.around_spikes import BEFORE, FAR_OUT, RECENT, STAYED_UP
from ampscope.analysis.diagnosis.gate import Outcome
from ampscope.analysis.overview.bad_steps import sampled_rank, world_of
from ampscope.analysis.results import Diagnosis, Finding, Incident
from ampscope.analysis.tables.step_history import History, histories
from ampscope.numerals import number
from ampscope.trace.read.run import Run
from ampscope.trace.vocabulary import Severity, Verdict

#: Steps since the failure, of fewer than which one may be out of the ordinary by itself.
_LEAST = 3


class Size(NamedTuple):
    """The loss or the gradient norm of a training that was run again, beside what was usual before it failed."""

    quantity: str
    now: float  #: median of the latest steps
    usual: float  #: median
    steps: int  #: how many the latest are
    is_usual: bool


def verified(before: Diagnosis, after: Diagnosis, found: Sequence[Size], code: int) -> tuple[Outcome, str]:
    """Judges a remedy: a failure is cured if it has not come back, and loss and gradient norm are of their usual size.

    Args:
        before: The run that went wrong.
        after: The one with the remedy.
        found: The `sizes` of its losses and gradient norms.
        code: The exit code of its command.

    Returns:
        What came out, passed where it is cured; and that in words.
    """
    failed = before.primary
    assert failed is not None, "a run without a failure has no remedy"
    was, made = f"{item_in_words(failed)} at step {failed.step}", f"{after.run.steps:,} steps"
    others = {_key(each) for each in _wrong(before) if each != failed} - {_key(failed)}
    back, known, new = [], [], []
    for each in _wrong(after):
        if each.cause is failed.cause and _key(each) not in others:
            back.append(each)
        elif isinstance(each, Finding) and _key(each) in others:
            known.append(each)
        elif not each.cause.is_ahead:
            new.append(each)
    still = f" Still there, as before: {', '.join(map(item_in_words, known))}." if known else ""
    if back or new:
        left = (back or new)[0]
        word = "still" if back else "that has gone, but as before" if _key(left) in others else "now"
        told = f"before, {was}; with the remedy, {word} {item_in_words(left)} at step {left.step}"
        return Outcome.FAILED, f"Not cured: {told}.{still}"
    if after.verdict in (Verdict.NOT_OBSERVED, Verdict.PARTLY_OBSERVED) or after.run.steps <= failed.step or not found:
        unseen = "" if found else ", and its loss and gradient norm are not known"
        return Outcome.NOT_KNOWN, f"Not known: before, {was}; the new run made {made}{unseen}.{still}"
    sizes_now = ", ".join(f"the {each.quantity} {number(each.now)} (usual: {number(each.usual)})" for each in found)
    seen = f"In the latest steps: {sizes_now}.{still}"
    if code:
        told = f"it has not come back in {made}, but the command ended with exit code {code}"
        return Outcome.NOT_KNOWN, f"Not known: {told}. {seen}"
    told = f"before, {was}; with the remedy it has not come back in {made}"
    unusual = [each for each in found if not each.is_usual]
    if not unusual:
        return Outcome.PASSED, f"Cured: {told}. {seen}"
    told = f"{told}, but the {' and the '.join(each.quantity for each in unusual)} did not stay as before. {seen}"
    if min(each.steps for each in unusual) < _LEAST:
        return Outcome.NOT_KNOWN, f"Not known: {told}"
    return Outcome.FAILED, f"Not cured: {told}"


def _wrong(diagnosis: Diagnosis) -> list[Incident | Finding]:
    """Lists what is wrong in a run, in the order in which it is told."""
    items: list[Incident | Finding] = [*diagnosis.findings, *diagnosis.incidents]
    wrong = [each for each in items if each.severity is not Severity.INFO]
    return sorted(wrong, key=lambda each: each != diagnosis.primary)


def _key(item: Incident | Finding) -> tuple[str, ...]:
    """Finds the mistake of one run in another, between which lines have moved."""
    if isinstance(item, Finding):
        return item.cause, item.source.code if item.source is not None else ""
    return item.cause, item.module, item.op


def sizes(first: Run, again: Run, failed: Incident | Finding) -> tuple[Size, ...]:
    """The loss and the gradient norm of a training that was run again, of each optimizer, as far as both are known.

    Usual is what they were in the good steps before the failure. Where none was before it, as before a mistake in the
    loop, it is what they are in the first of the new run.
    Losses that have a sign, or are those of several optimizers, have no usual size.

    Args:
        first: The run that failed.
        again: The new one.
        failed: What went wrong in the first one.
    """
    step = failed.step if isinstance(failed, Incident) else 0
    before, after = (histories(run, sampled_rank(run, world_of(run))) for run in (first, again))
    found: list[Size] = []
    for optimizer, history in after.items():
        earlier, fell = before.get(optimizer, history), False
        for quantity, limit in (("loss", STAYED_UP), ("gradient norm", FAR_OUT)):
            of_loss, values = quantity == "loss", _good(history, quantity)
            usual, latest = _good(earlier, quantity)[earlier.step < step], values[history.step >= step]
            usual, values, latest = (each[~np.isnan(each)] for each in (usual, values, latest))
            usual = usual[-BEFORE:] if usual.size else values[: min(RECENT, (values.size + 1) // 2)]
            latest = latest[-RECENT:]
            if not usual.size or not latest.size or (of_loss and (len(after) > 1 or usual.min() <= 0)):
                continue
            now, (low, middle, high) = float(np.median(latest)), np.quantile(usual, (0.25, 0.5, 0.75))
            fell = fell or bool(of_loss and now < low)  # where the loss does, the norm may grow
            is_usual = (fell or now <= limit * high) and (of_loss or now > 0 or middle == 0)
            found.append(Size(quantity, now, float(middle), latest.size, bool(is_usual)))
    return tuple(found)


def _good(history: History, quantity: str) -> FloatArray:
    """Gives a quantity of each step that was made; NaN for others."""
    values = history.loss if quantity == "loss" else history.grad_norm
    return np.where(history.skipped | history.thinned, np.nan, values)
