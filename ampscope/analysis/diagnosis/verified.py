"""Whether a failure has gone from a training that was run again with a remedy in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ampscope.analysis.causes.catalogue import item_in_words
from ampscope.analysis.diagnosis.gate.results import Outcome
from ampscope.analysis.diagnosis.silent.course import BEFORE, FAR_OUT, RECENT, STAYED_UP
from ampscope.analysis.numerics.arrays import FloatArray
from ampscope.analysis.overview.ranks.world import sampled_rank, world_of
from ampscope.analysis.results import Diagnosis, Finding, Incident
from ampscope.analysis.tables.step_history import History, histories
from ampscope.analysis.words.number_words import number
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


class Verified(NamedTuple):
    """What became of a failure."""

    outcome: Outcome  #: passed where it is cured
    text: str


def verified(before: Diagnosis, after: Diagnosis, found: Sequence[Size], code: int) -> Verified:
    """Judges a remedy: a failure is cured if it has not come back, and loss and gradient norm are of their usual size.

    Args:
        before: The run that went wrong.
        after: The one with the remedy.
        found: The `sizes` of its losses and gradient norms.
        code: The exit code of its command.
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
        return Verified(Outcome.FAILED, f"Not cured: {told}.{still}")
    if after.verdict is Verdict.NOT_OBSERVED or after.run.steps <= failed.step or not found:
        unseen = "" if found else ", and its loss and gradient norm are not known"
        return Verified(Outcome.NOT_KNOWN, f"Not known: before, {was}; the new run made {made}{unseen}.{still}")
    sizes_now = ", ".join(f"the {each.quantity} {number(each.now)} (usual: {number(each.usual)})" for each in found)
    seen = f"In the latest steps: {sizes_now}.{still}"
    if code:
        told = f"it has not come back in {made}, but the command ended with exit code {code}"
        return Verified(Outcome.NOT_KNOWN, f"Not known: {told}. {seen}")
    told = f"before, {was}; with the remedy it has not come back in {made}"
    unusual = [each for each in found if not each.is_usual]
    if not unusual:
        return Verified(Outcome.PASSED, f"Cured: {told}. {seen}")
    told = f"{told}, but the {' and the '.join(each.quantity for each in unusual)} did not stay as before. {seen}"
    if min(each.steps for each in unusual) < _LEAST:
        return Verified(Outcome.NOT_KNOWN, f"Not known: {told}")
    return Verified(Outcome.FAILED, f"Not cured: {told}")


def _wrong(diagnosis: Diagnosis) -> list[Incident | Finding]:
    items: list[Incident | Finding] = [*diagnosis.findings, *diagnosis.incidents]
    first = [diagnosis.primary] if diagnosis.primary is not None else []
    return first + [each for each in items if each.severity is not Severity.INFO and each != diagnosis.primary]


def _key(item: Incident | Finding) -> tuple[str, ...]:
    """The same in two runs, between which lines have moved."""
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
        earlier = before.get(optimizer, history)
        losses, norms = (_Values.of(earlier, history, step, quantity) for quantity in ("loss", "grad_norm"))
        fell = False
        if losses is not None and len(after) == 1 and losses.usual.min() > 0:
            fell = losses.now < np.quantile(losses.usual, 0.25)
            found.append(losses.size("loss", is_usual=losses.now <= STAYED_UP * np.quantile(losses.usual, 0.75)))
        if norms is not None:
            is_far = norms.now > FAR_OUT * np.quantile(norms.usual, 0.75) and not fell
            is_gone = norms.now == 0 < np.median(norms.usual)
            found.append(norms.size("gradient norm", is_usual=not is_far and not is_gone))
    return tuple(found)


class _Values(NamedTuple):
    """One quantity of an optimizer, in good steps."""

    usual: FloatArray
    latest: FloatArray

    @staticmethod
    def of(earlier: History, history: History, step: int, quantity: str) -> _Values | None:
        """The values before ``step`` and the latest since; None where none are known."""
        usual = _known(earlier, quantity)[earlier.step < step]
        values = _known(history, quantity)
        usual, first, latest = (each[~np.isnan(each)] for each in (usual, values, values[history.step >= step]))
        usual = usual[-BEFORE:] if usual.size else first[: min(RECENT, (first.size + 1) // 2)]
        return _Values(usual, latest[-RECENT:]) if usual.size and latest.size else None

    @property
    def now(self) -> float:
        return float(np.median(self.latest))

    def size(self, quantity: str, *, is_usual: bool) -> Size:
        return Size(quantity, self.now, float(np.median(self.usual)), self.latest.size, bool(is_usual))


def _known(history: History, quantity: str) -> FloatArray:
    """What the optimizer's good steps had; NaN for others."""
    values: FloatArray = history.loss if quantity == "loss" else history.grad_norm
    return np.where(history.skipped | history.thinned, np.nan, values)
