"""What is checked of a loop's use of autocast and the scaler, and what came out."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.causes import usage
from ampscope.analysis.results import Diagnosis
from ampscope.trace.vocabulary import Cause, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that a correct loop does."""

    cause: Cause  #: what the mistake is called
    words: str  #: what a correct loop does, as a sentence without full stop
    found: int  #: places where this one does not
    noted: int  #: places where it does not, and that does not matter
    applies: bool  #: whether the run could show the mistake at all

    @property
    def passed(self) -> bool:
        """Whether the loop does it right, as far as the run can show."""
        return self.applies and not self.found and not self.noted


def usage_checks(diagnosis: Diagnosis) -> tuple[Check, ...]:
    """Every check of the use of autocast and the scaler, in the order of a step."""
    has_scaler = bool(diagnosis.scale)
    found = [each.cause for each in diagnosis.findings if each.severity is not Severity.INFO]
    noted = [each.cause for each in diagnosis.findings if each.severity is Severity.INFO]
    return tuple(
        Check(
            cause=entry.cause,
            words=entry.correct,
            found=found.count(entry.cause),
            noted=noted.count(entry.cause),
            applies=has_scaler or not entry.of_scaler or entry.cause in (*found, *noted),
        )
        for entry in usage.ENTRIES
    )
