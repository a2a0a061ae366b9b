"""What AMPscope says of a mutant, held against the truth; ``python -m tests.mutation.score`` prints a table."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from ampscope.analysis.results import Diagnosis
from ampscope.trace.vocabulary import Cause, Verdict
from tests.mutation.hosts import BF16_ALONE, HOSTS
from tests.mutation.operators import OPERATORS, Host, Mutant
from tests.mutation.oracle import Kind, Truth, truth
from tests.mutation.running import Lane, watched

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Outcome(StrEnum):
    """How far what is said is right, the gravest first."""

    MISSED = "missed"  #: a broken loop is not told
    FALSE_ALARM = "false alarm"
    CAUSE = "cause"
    STEP = "step"
    PLACE = "place"
    RIGHT = "right"
    UNCLEAR = "unclear"  #: there is no truth to hold it against


@dataclass(frozen=True, slots=True)
class Case:
    """A mutant of a host in one precision."""

    host: str
    precision: str
    mutant: Mutant

    def __str__(self) -> str:
        return f"{self.host} {self.precision}, {self.mutant.operator}: {self.mutant.what}"


@dataclass(frozen=True, slots=True)
class Score:
    """A case with the truth, what was said, and how they agree."""

    case: Case
    truth: Truth
    outcome: Outcome
    said: str = ""


def cases() -> Iterator[Case]:
    """Every mutant of every host, in an order that does not change."""
    for host, source in HOSTS.items():
        for precision in ("bf16",) if host in BF16_ALONE else HALVES:
            for operator in OPERATORS:
                for mutant in operator(Host(source)):
                    yield Case(host, precision, mutant)


def scored(case: Case, folder: Path) -> Score:
    """Asks the oracle and, where it knows, AMPscope."""
    half = HALVES[case.precision]
    known = truth(case.mutant, HOSTS[case.host], half)
    if known.kind is Kind.UNCLEAR:
        return Score(case, known, Outcome.UNCLEAR)
    diagnosis = watched(case.mutant.source, Lane(half), folder)
    return Score(case, known, outcome(case.mutant, known, diagnosis), words(diagnosis))


def words(diagnosis: Diagnosis) -> str:
    """The verdict, and where and why, in a line."""
    told = diagnosis.primary
    if told is None:
        return str(diagnosis.verdict)
    source = told.source
    place = f"line {source.line}: {source.code}" if source is not None else "no line"
    return f"{diagnosis.verdict}, {told.cause} at step {told.step}, {place}"


def outcome(mutant: Mutant, known: Truth, diagnosis: Diagnosis) -> Outcome:
    """The gravest thing that is wrong in what is said."""
    told = diagnosis.primary
    if not known.broken:
        quiet = {Verdict.HEALTHY} if mutant.null else {Verdict.HEALTHY, Verdict.AT_RISK}
        return Outcome.RIGHT if diagnosis.verdict in quiet else Outcome.FALSE_ALARM
    if diagnosis.verdict not in {Verdict.PROBLEM, Verdict.AT_RISK} or told is None:
        return Outcome.MISSED
    if told.cause not in (mutant.causes or {told.cause}) or told.cause is Cause.UNKNOWN:
        return Outcome.CAUSE
    if known.step is not None and told.step not in {known.step, known.step + (known.kind is Kind.WEIGHTS)}:
        return Outcome.STEP
    if told.source is None:
        return Outcome.RIGHT if known.kind in {Kind.STANDS, Kind.WRONG} else Outcome.PLACE
    return Outcome.RIGHT if told.source.line in mutant.lines | known.lines else Outcome.PLACE


def table(scores: Sequence[Score]) -> str:
    """Counts by operator, host and precision, and a line for each case that is not right."""
    lines = []
    keys: dict[str, Callable[[Score], str]] = {
        "operator": lambda score: score.case.mutant.operator,
        "host": lambda score: score.case.host,
        "precision": lambda score: score.case.precision,
        "truth": lambda score: score.truth.kind,
    }
    for name, key in keys.items():
        lines += ["", f"{name:<16}" + "".join(f"{each:>12}" for each in Outcome)]
        for value in sorted({key(score) for score in scores}):
            counts = Counter(score.outcome for score in scores if key(score) == value)
            lines.append(f"{value:<16}" + "".join(f"{counts[each] or '':>12}" for each in Outcome))
    return "\n".join(lines)


def told(score: Score) -> str:
    """A case that is not right, in two lines."""
    since = "" if score.truth.step is None else f" from step {score.truth.step}"
    lines = sorted(score.case.mutant.lines | score.truth.lines)
    return f"{score.outcome}: {score.case}\n    {score.truth.kind}{since}, lines {lines}; said: {score.said}"


def main() -> None:
    """Scores ``COUNT`` mutants drawn by ``SEED``, or all."""
    everything = list(cases())
    count = int(os.environ.get("COUNT") or len(everything))
    drawn = random.Random(int(os.environ.get("SEED") or 0)).sample(everything, min(count, len(everything)))
    scores = []
    torch.set_num_threads(1)
    for number, case in enumerate(drawn):
        with tempfile.TemporaryDirectory() as folder:
            scores.append(scored(case, Path(folder) / str(number)))
        if scores[-1].outcome not in {Outcome.RIGHT, Outcome.UNCLEAR}:
            print(told(scores[-1]), file=sys.stderr, flush=True)  # noqa: T201  # what it is run for
    print(table(scores))  # noqa: T201


if __name__ == "__main__":
    main()
