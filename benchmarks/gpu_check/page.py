"""The page that answers: claims, costs, and one verdict."""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import Any

from gpu_check.claim import Answer, Outcome

WIDTH = 118
_NAMES = 26


def claims(answers: list[Answer]) -> str:
    """A line for each claim; what was seen below those that do not hold."""
    lines = []
    for answer in answers:
        lines.append(f"{answer.outcome:8}{answer.name:{_NAMES}}{answer.seconds:5.1f} s  {_short(answer)}")
        if answer.outcome is Outcome.WRONG:
            lines += textwrap.wrap(f"claimed: {answer.says}. Seen: {answer.seen}", WIDTH - 8, initial_indent="        ",
                                   subsequent_indent="        ")  # fmt: skip
    return "\n".join(lines)


def _short(answer: Answer) -> str:
    text = answer.says if answer.outcome is Outcome.WRONG else answer.seen
    return textwrap.shorten(text, WIDTH - _NAMES - 17, placeholder=" ...")


def costs(measured: dict[str, Any]) -> str:
    """A table for each training: steps in milliseconds, ratios to the unwatched one, memory beyond it."""
    lines = []
    for title, rows in measured.items():
        lines.append(f"{title}")
        lines += [f"  {name:{_NAMES + 6}}{_cost(row)}" for name, row in rows.items()]
    return "\n".join(lines)


def _cost(row: dict[str, Any]) -> str:
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    low, middle, high = row["ratio"]
    memory = f"  {row['memory'] / 2**20:+8.1f} MiB" if row.get("memory") is not None else ""
    return f"{row['step_ms']:10.3f} ms  {middle:6.3f} ({low:.3f} to {high:.3f}){memory}"


def verdict(answers: list[Answer]) -> str:
    """One sentence."""
    counts = Counter(answer.outcome for answer in answers)
    wrong = [answer.name for answer in answers if answer.outcome is Outcome.WRONG]
    held = f"{counts[Outcome.HOLDS]} of {len(answers) - counts[Outcome.SKIPPED]} claims hold"
    skipped = f", {counts[Outcome.SKIPPED]} could not be asked here" if counts[Outcome.SKIPPED] else ""
    if wrong:
        return f"NOT RIGHT HERE: {held}{skipped}. Wrong: {', '.join(wrong)}."
    return f"AMPscope is right here: {held}{skipped}."
