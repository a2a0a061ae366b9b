"""The one sentence on a run."""

from __future__ import annotations

from collections.abc import Sequence

from ampscope.analysis.causes.catalogue import item_in_words
from ampscope.analysis.cures import trials
from ampscope.analysis.results import Checked, Finding, Incident, RunInfo, SourceLine
from ampscope.analysis.words.rank_words import first_ranked, further_in_words, ranks_in_words, received_in_words
from ampscope.analysis.words.wording import op_in_words, when_in_words
from ampscope.trace.schema import Trigger
from ampscope.trace.vocabulary import Cause

#: What a loss scale does by itself.
SCALE_AT_WORK = frozenset(
    {Cause.BENIGN_INITIAL_CALIBRATION, Cause.BENIGN_PERIODIC_GROWTH, Cause.BENIGN_SCALE_ADJUSTMENT}
)


def summary(
    primary: Incident | Finding | None,
    run: RunInfo,
    checked: Checked,
    *,
    incidents: Sequence[Incident],
    unlooked: Sequence[str] = (),
) -> str:
    """The one sentence on a run.

    Args:
        primary: What to tell first.
        run: Its extent.
        checked: How much of it was looked at.
        incidents: All of them.
        unlooked: Why not all was looked at, in sentences.
    """
    made = _counted(run.steps, "step")
    if primary is None:
        causes = {each.cause for each in incidents}
        jumped = next(
            (f" From step {each.step:,} on the gradient norm is far larger." for each in incidents if each.lasting), ""
        )
        by_scale = not SCALE_AT_WORK.isdisjoint(causes) and Cause.BENIGN_SINGLE_SKIP not in causes
        why = " while the loss scale found its place" if by_scale else ""
        skipped = f" ({run.skipped:,} skipped{why})" if run.skipped else ""
        seen = " that was seen" if unlooked else ""
        return " ".join((f"No numerical fault{seen} in {made}{skipped}; {_checked(run, checked)}.{jumped}", *unlooked))
    if isinstance(primary, Finding):
        when = when_in_words(primary)
        where = f",{_at(primary.source)}" if primary.source else ""
        return f"{when[:1].upper()}{when[1:]}{where}: {primary.explanation}"
    if primary.cause.is_ahead:
        return f"Nothing is wrong yet in {made}. {primary.explanation}{_at_risk_in(primary)}"
    effect = _effect(primary)
    elsewhere = f"{further_in_words(primary)} {received_in_words(primary)}".strip()
    if primary.cause is Cause.REPLICA_APART and len(primary.also_on) + 1 == primary.world:  # nobody is to blame
        return primary.explanation
    if not primary.op:
        where = _at(primary.source) if primary.trigger == Trigger.EXCEPTION else ""
        return " ".join(filter(None, (f"Step {primary.step} {effect}{where}.", primary.explanation, elsewhere)))
    outside = "the model itself" if primary.module_type else "the loss code"
    where = f"module {primary.module}" if primary.module else outside
    where = "the optimizer" if primary.phase == "optimizer" else where
    lead = f"Step {primary.step} {effect}: {op_in_words(primary.op)} in {where}{_at(primary.source)} is the origin"
    told = (f"{lead} ({primary.phase}).", primary.explanation, trials.in_words(primary), elsewhere)
    return " ".join(filter(None, told))


def _checked(run: RunInfo, checked: Checked) -> str:
    """How much was looked at, and what was not, as a clause."""
    every = "it" if run.steps == 1 else "all"
    parts = {"ops": checked.traced, "gradients": checked.gradients}
    seen = [f"{name} in {every if n >= run.steps else f'{n:,} of them'}" for name, n in parts.items() if n]
    seen += [f"weights at {_counted(checked.state_looks, 'look')}"] if checked.state_looks else []
    unseen = ["ops (no step was traced)"] if not checked.traced else []
    unseen += ["gradients"] if not checked.gradients else []
    unseen += ["weights"] if not checked.state_looks else []
    unseen += [f"{_counted(checked.lost, 'step')} that the trace lacks"] if checked.lost else []
    unseen += [ranks_in_words(run.missing)] if run.missing else []
    told = (("checked", seen), ("not checked", unseen))
    return "; ".join(f"{word}: {', '.join(parts)}" for word, parts in told if parts)


def what_happened(primary: Incident | Finding) -> str:
    """What is seen of it, as a sentence without the place and the reason: those are said where they belong."""
    if isinstance(primary, Finding):
        return f"{item_in_words(primary)[:1].upper()}{item_in_words(primary)[1:]}."
    if primary.cause.is_ahead:
        return "Nothing is wrong yet."
    if primary.cause.is_benign:
        return ""
    return f"Step {primary.step:,} {_effect(primary)}."


def _counted(number: int, one: str) -> str:
    return f"{number:,} {one}" if number == 1 else f"{number:,} {one}s"


def _effect(primary: Incident) -> str:
    effect = _EFFECTS.get(primary.trigger or primary.cause, "went wrong")
    effect = f"began {item_in_words(primary)}" if primary.lasting else effect
    return " ".join(filter(None, (effect, first_ranked(primary))))


_EFFECTS: dict[str, str] = {
    Trigger.NONFINITE_GRADIENT: "had non-finite gradients",
    Trigger.NONFINITE_LOSS: "had a non-finite loss",
    Trigger.NONFINITE_WEIGHT: "left non-finite weights",
    Trigger.NONFINITE_BUFFER: "left a non-finite buffer",
    Trigger.BUFFER_STANDS_STILL: "left a buffer where it was",
    Trigger.UPDATES_LOST: "lost updates to rounding",
    Trigger.NONFINITE_STATE: "met state that is not finite",
    Trigger.NONFINITE_CARRIED: "left a tensor that the loop carries non-finite",
    Trigger.CARRIED_READ: "read a non-finite tensor that the loop carries",
    Trigger.EXCEPTION: "was cut off by an error",
    Trigger.ABSORBED_OVERFLOW: "computed with an overflow that nobody noticed",
    Trigger.INFORMATION_LOST: "went on with few of many values",
    Trigger.LOST_GRADIENT: "lost gradients that float32 keeps",
    Cause.SPIKE: "stood far out",
}


def _at_risk_in(warning: Incident) -> str:
    """Where what may happen would happen, in a sentence."""
    where = " ".join(filter(None, (f"module {warning.module}" if warning.module else "", _at(warning.source).strip())))
    return f" It is in {where}." if warning.module else f" It is {where}." if where else ""


def _at(source: SourceLine | None) -> str:
    if source is None:
        return ""
    name = source.file.replace("\\", "/").rsplit("/", 1)[-1]
    return f" at {name}:{source.line}"
