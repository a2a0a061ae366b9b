"""What a gate finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ampscope.analysis.results import Diagnosis, SourceLine

#: Version of the JSON object that ``ampscope gate --json`` prints.
JSON_SCHEMA = 1


class Limit(StrEnum):
    """What is checked."""

    VERDICT = "verdict"  #: nothing is wrong with the run
    MAX_SKIPPED = "max_skipped"  #: the share of optimizer steps that a scaler skipped
    NO_NEW_OVERFLOW = "no_new_overflow"  #: no place overflowed that did not overflow in the baseline
    MIN_HEADROOM = "min_headroom"  #: factors of two between the largest value of any place and its dtype's end


class Outcome(StrEnum):
    """How a check, or all of them together, came out."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_KNOWN = "not_known"  #: the run holds nothing by which it could be told


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One limit, and how the run stands to it."""

    limit: Limit
    outcome: Outcome
    text: str  #: in a sentence
    measured: float | None = None  #: of the run, in the limit's own unit
    allowed: float | None = None
    baseline: float | None = None  #: the same of the baseline; null without one
    module: str = ""  #: of the place that decides it
    op: str = ""
    source: SourceLine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The checks of one run."""

    schema: int = JSON_SCHEMA
    outcome: Outcome
    checks: tuple[Check, ...]
    baseline: str = ""  #: the folder of the run that it was held against
    diagnosis: Diagnosis
