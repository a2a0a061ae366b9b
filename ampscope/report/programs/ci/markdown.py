"""A gate as Markdown: the summary of a job, or a comment under a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ampscope.analysis.diagnosis.gate_limits import Check, Gate, Outcome
from ampscope.report.programs.ci.told import NAMES, OUTCOMES, first_change, matters, quantity, title
from ampscope.report.safe_text import visible, visible_lines
from ampscope.report.wording.remedy_words import remedy_in_words

_MARKS = {Outcome.PASSED: "\N{WHITE HEAVY CHECK MARK}", Outcome.FAILED: "\N{CROSS MARK}", Outcome.NOT_KNOWN: "❔"}
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|!~])")


def as_markdown(gate: Gate) -> str:
    """A heading, a row for each check, and what went wrong with the change that cures it."""
    return "\n".join(_lines(gate)) + "\n"


def _lines(gate: Gate) -> Iterator[str]:
    run = gate.diagnosis.run
    yield f"### {_MARKS[gate.outcome]} AMPscope: {_text(run.name)} {OUTCOMES[gate.outcome]}"
    yield ""
    yield "| check | | measured | allowed | baseline | |"
    yield "|---|---|---|---|---|---|"
    for check in gate.checks:
        yield _row(check)
    for item in matters(gate.diagnosis):
        yield from ("", f"**{_text(title(item))}**", "", _text(item.explanation))
        remedy = first_change(item)
        if remedy is not None:
            yield from ("", f"Next: {_text(remedy.text)} ({_text(remedy_in_words(remedy))})")
            yield from _block(remedy.diff or "", "diff") if remedy.diff else _block(remedy.code, "python")


def _row(check: Check) -> str:
    each = [quantity(check.limit, amount) for amount in (check.measured, check.allowed, check.baseline)]
    outcome = f"{_MARKS[check.outcome]} {OUTCOMES[check.outcome]}"
    return f"| {' | '.join([NAMES[check.limit], outcome, *each, _text(check.text)])} |"


def _block(text: str, language: str) -> Iterator[str]:
    """A block of code; its fence is longer than any in the code."""
    if not text:
        return
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    yield from ("", f"{fence}{language}", *visible_lines(text), fence)


def _text(text: str) -> str:
    """Someone else's text, on one line, with what Markdown would read taken out of force."""
    return _SPECIAL.sub(r"\\\1", visible(text))
