"""What a run has to keep, and whether it has: light to import, for the gate is asked of a run that is over."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ampscope.analysis.results import Diagnosis, SourceLine
from ampscope.errors import AmpscopeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a run has to keep; what is None is not checked."""

    strict: bool = False  #: whether a run at risk fails as well
    max_skipped: float | None = None  #: share, 0 to 1; without the steps in which a scale first finds its place
    no_new_overflow: bool = False
    min_headroom: float | None = None  #: bits

    @classmethod
    def asked(
        cls,
        *,
        strict: bool = False,
        max_skipped: str | float | None = None,
        no_new_overflow: bool = False,
        min_headroom: float | None = None,
    ) -> Limits:
        """Limits as people write them: a share is ``"1%"`` or 0.01.

        Raises:
            AmpscopeError: a number that a limit cannot have.
        """
        if min_headroom is not None and not min_headroom >= 0:
            raise AmpscopeError(f"min_headroom is {min_headroom!r}; it counts factors of two, and is 0 or more")
        return cls(
            strict=strict,
            max_skipped=None if max_skipped is None else _share(max_skipped),
            no_new_overflow=no_new_overflow,
            min_headroom=min_headroom,
        )


def _share(asked: str | float) -> float:
    text = str(asked).strip()
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        number = float("nan")
    if not 0 <= number <= 1:
        raise AmpscopeError(f"{asked!r} is no share of steps; write 1% or 0.01")
    return number


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
