"""A gate holds a run against limits: its verdict, its skips, where it overflowed and how near other places came."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from ampscope.analysis.diagnosis.diagnosis import diagnose
from ampscope.analysis.diagnosis.gate_limits import Limits
from ampscope.analysis.precision.ranges.measured import measured_places
from ampscope.analysis.precision.ranges.ranges import RangeRow, range_row
from ampscope.analysis.results import Diagnosis, SourceLine
from ampscope.analysis.words import place_in_words
from ampscope.numerals import number
from ampscope.trace.read.run import Run
from ampscope.trace.vocabulary import Verdict

#: Version of the JSON object that ``ampscope gate --json`` prints.
JSON_SCHEMA = 1


class Limit(StrEnum):
    """Names the properties of a run that the gate checks."""

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
class LimitCheck:
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
    checks: tuple[LimitCheck, ...]
    baseline: str = ""  #: the folder of the run that it was held against
    diagnosis: Diagnosis


@dataclass(frozen=True, slots=True, kw_only=True)
class Headrooms:
    """Holds the measured headroom of a run; places whose values carry a loss scale are the scaler's own affair."""

    overflowed: tuple[RangeRow, ...]  #: places that gave infinities of finite numbers, and not on purpose
    closest: RangeRow | None  #: of all that can grow; null where nothing was measured
    measured: bool  #: whether the ops of any step were recorded


def headrooms(run: Run) -> Headrooms:
    """The places of all ranks.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    found = [measured_places(run, rank=rank) for rank in run.ranks]
    overflowed = [
        range_row(each, of.cells) for of in found for each in of.places if each.overflowed and each.scale is None
    ]
    near = [
        (rank, each) for rank, of in enumerate(found) for each in of.places if each.may_overflow and each.seen.largest
    ]
    closest = min(near, key=lambda pair: pair[1].place.format.max / (pair[1].seen.largest or 1.0), default=None)
    return Headrooms(
        overflowed=_once(overflowed),
        closest=range_row(closest[1], found[closest[0]].cells) if closest is not None else None,
        measured=any(of.places for of in found),
    )


def new_overflows(now: Iterable[RangeRow], before: Iterable[RangeRow]) -> Iterator[RangeRow]:
    """Yields the places of ``now`` that ``before`` does not have.

    Lines of a program move from commit to commit, so a place is known by all but its line's number; where several lines
    are alike in that, as many are new as have been added, those with other code first.
    """
    known = list(before)
    codes = {(_name(row), _code(row)) for row in known}
    left = Counter(map(_name, known))
    for row in sorted(now, key=lambda row: (_name(row), _code(row)) not in codes):
        if left[_name(row)]:
            left[_name(row)] -= 1
        else:
            yield row


def _name(row: RangeRow) -> tuple[str, str, str, str, str, int]:
    return row.module, row.op, row.phase, row.dtype, row.name, row.optimizer


def _code(row: RangeRow) -> str:
    return row.source.code if row.source is not None else ""


def _once(rows: Iterable[RangeRow]) -> tuple[RangeRow, ...]:
    """A place that overflowed on several ranks is one."""
    return tuple({row.key: row for row in rows}.values())


_OF_VERDICTS = {
    Verdict.HEALTHY: Outcome.PASSED,
    Verdict.AT_RISK: Outcome.PASSED,
    Verdict.PROBLEM: Outcome.FAILED,
    Verdict.PARTLY_OBSERVED: Outcome.NOT_KNOWN,
    Verdict.NOT_OBSERVED: Outcome.NOT_KNOWN,
}


def gate(run: Run, limits: Limits, baseline: Run | None = None) -> Gate:
    """Checks a run.

    Args:
        run: The run.
        limits: What it has to keep.
        baseline: A run of the same program that is held to be good, such as the main branch's.

    Raises:
        RunError: a run cannot be read.
    """
    now, before = _Measured(run), _Measured(baseline) if baseline is not None else None
    checks = tuple(_checks(now, before, limits))
    outcomes = {check.outcome for check in checks}
    worst = next(each for each in (Outcome.FAILED, Outcome.NOT_KNOWN, Outcome.PASSED) if each in outcomes)
    return Gate(
        outcome=worst, checks=checks, baseline=str(baseline.path) if baseline is not None else "", diagnosis=now.told
    )


class _Skipped(NamedTuple):
    lost: int
    of: int

    @property
    def share(self) -> float | None:
        return self.lost / self.of if self.of else None


@dataclass(eq=False)
class _Measured:
    """Holds what is known of one run; each part is found when a limit asks for it."""

    run: Run

    @cached_property
    def told(self) -> Diagnosis:
        return diagnose(self.run)

    @cached_property
    def headrooms(self) -> Headrooms:
        return headrooms(self.run)

    @cached_property
    def skipped(self) -> _Skipped:
        """Steps that were lost after the scale had found its place, of the optimizer that lost the largest share."""
        scaled = [_Skipped(each.skipped - each.calibrating, each.steps) for each in self.told.scale if each.steps]
        return max(
            scaled, key=lambda each: each.share or 0, default=_Skipped(self.told.run.skipped, self.told.run.steps)
        )


def _checks(now: _Measured, before: _Measured | None, limits: Limits) -> Iterator[LimitCheck]:
    yield _verdict(now.told, strict=limits.strict)
    if limits.max_skipped is not None:
        yield _skipped(now.skipped, limits.max_skipped, before.skipped if before is not None else None)
    if limits.no_new_overflow:
        yield _overflow(now.headrooms, before.headrooms if before is not None else None)
    if limits.min_headroom is not None:
        yield _headroom(now.headrooms, limits.min_headroom, before.headrooms if before is not None else None)


def _verdict(told: Diagnosis, *, strict: bool) -> LimitCheck:
    outcome = _OF_VERDICTS[told.verdict]
    if told.verdict is Verdict.AT_RISK and (strict or told.unobserved):
        outcome = Outcome.FAILED if strict else Outcome.NOT_KNOWN
    primary = told.primary
    return LimitCheck(
        limit=Limit.VERDICT,
        outcome=outcome,
        text=told.summary,
        module=getattr(primary, "module", ""),
        op=getattr(primary, "op", ""),
        source=primary.source if primary is not None else None,
    )


def _skipped(now: _Skipped, allowed: float, before: _Skipped | None) -> LimitCheck:
    if now.share is None:
        text, outcome = "The run made no optimizer step, so none could be skipped.", Outcome.NOT_KNOWN
    else:
        outcome = Outcome.PASSED if now.share <= allowed else Outcome.FAILED
        text = f"{now.lost:,} of {now.of:,} steps were skipped after the loss scale had found its place."
    return LimitCheck(
        limit=Limit.MAX_SKIPPED,
        outcome=outcome,
        text=text,
        measured=now.share,
        allowed=allowed,
        baseline=before.share if before is not None else None,
    )


def _overflow(now: Headrooms, before: Headrooms | None) -> LimitCheck:
    known = before.overflowed if before is not None else ()
    new = list(new_overflows(now.overflowed, known))
    worst = max(new, key=lambda row: row.overflowed, default=None)
    if worst is not None:
        outcome = Outcome.FAILED
        others = f", and {_more(len(new) - 1)}" if len(new) > 1 else ""
        text = f"{_overflowed(worst)[:-1]}{others}."
    elif not now.measured or (before is not None and not before.measured):
        outcome, which = Outcome.NOT_KNOWN, "The baseline" if now.measured else "The run"
        text = f"{which} has no step whose ops were recorded; a watched run has one from its first step."
    else:
        outcome = Outcome.PASSED
        text = "No op overflowed in the recorded steps" + (" that did not in the baseline." if known else ".")
    check = LimitCheck(
        limit=Limit.NO_NEW_OVERFLOW,
        outcome=outcome,
        text=text,
        measured=float(len(new)) if now.measured else None,
        allowed=0.0,
        baseline=float(len(known)) if before is not None else None,
    )
    return _at(check, worst)


def _headroom(now: Headrooms, allowed: float, before: Headrooms | None) -> LimitCheck:
    closest = now.overflowed[0] if now.overflowed else now.closest
    bits = _bits(now)
    if closest is None or bits is None:
        text, outcome = "The run has no recorded values that can grow.", Outcome.NOT_KNOWN
    else:
        outcome = Outcome.PASSED if bits >= allowed else Outcome.FAILED
        text = f"{_place(closest)} comes closest: {number(bits)} factors of two below overflow in {closest.dtype}."
        text = text if bits else _overflowed(closest)
    check = LimitCheck(
        limit=Limit.MIN_HEADROOM,
        outcome=outcome,
        text=text,
        measured=bits,
        allowed=allowed,
        baseline=_bits(before) if before is not None else None,
    )
    return _at(check, closest)


def _bits(found: Headrooms) -> float | None:
    if found.overflowed:
        return 0.0
    return found.closest.headroom_bits if found.closest is not None else None


def _at(check: LimitCheck, row: RangeRow | None) -> LimitCheck:
    return check if row is None else replace(check, module=row.module, op=row.op, source=row.source)


def _place(row: RangeRow) -> str:
    name = place_in_words(row.op, row.name)
    module = f" in module {row.module}" if row.module else ""
    line = f" at {row.source.file}:{row.source.line}" if row.source is not None else ""
    return f"{name}{module}{line}"


def _overflowed(row: RangeRow) -> str:
    return f"{_place(row)} gave infinities of finite numbers in {row.dtype}."


def _more(places: int) -> str:
    return "one further place" if places == 1 else f"{places} further places"
