"""What is told of a gate in every form: its checks by name, and the items of its diagnosis that matter."""

from __future__ import annotations

from collections.abc import Iterator

from ampscope.analysis.causes.catalogue import what_in_words
from ampscope.analysis.diagnosis.gate_limits import Check, Gate, Limit, Outcome
from ampscope.analysis.results import Diagnosis, Finding, Incident, Remedy
from ampscope.analysis.words import number, when_in_words
from ampscope.report import numbers
from ampscope.report.safe_text import visible
from ampscope.trace.vocabulary import Severity

NAMES = {
    Limit.VERDICT: "verdict",
    Limit.MAX_SKIPPED: "skipped steps",
    Limit.NO_NEW_OVERFLOW: "new overflows",
    Limit.MIN_HEADROOM: "headroom",
}
OUTCOMES = {Outcome.PASSED: "passed", Outcome.FAILED: "failed", Outcome.NOT_KNOWN: "not known"}


def quantity(limit: Limit, amount: float | None, *, missing: str = "") -> str:
    """A number in the unit of its limit: ``1.2 %``, ``3 bits``."""
    if amount is None:
        return missing
    if limit is Limit.MAX_SKIPPED:
        return numbers.share(amount)
    return f"{number(amount)} bits" if limit is Limit.MIN_HEADROOM else numbers.count(amount)


def failures(gate: Gate) -> list[Check]:
    """The checks that did not pass."""
    return [check for check in gate.checks if check.outcome is not Outcome.PASSED]


def matters(diagnosis: Diagnosis) -> Iterator[Incident | Finding]:
    """What is an error or a warning, what is told first before all else."""
    items: list[Incident | Finding] = [*diagnosis.incidents, *diagnosis.findings]
    first = [diagnosis.primary] if diagnosis.primary is not None else []
    others = [item for item in items if item != diagnosis.primary]
    yield from (item for item in [*first, *others] if item.severity is not Severity.INFO)


def title(item: Incident | Finding) -> str:
    """Its cause and its steps on one line."""
    words = what_in_words(item)
    return visible(f"{words[:1].upper()}{words[1:]}, {when_in_words(item)}")


def first_change(item: Incident | Finding) -> Remedy | None:
    """The remedy that stands first, where one does."""
    return item.remedies[0] if item.remedies else None


def next_change(item: Incident | Finding) -> str:
    """The first remedy with its change of a line, as plain text; empty where there is none."""
    remedy = first_change(item)
    if remedy is None:
        return ""
    change = remedy.diff or remedy.code
    return "\n".join(filter(None, (f"Next: {remedy.text}", change.rstrip("\n"))))


def in_full(item: Incident | Finding) -> str:
    """Why, and the first remedy, as plain text."""
    return "\n".join(filter(None, (item.explanation, next_change(item))))
