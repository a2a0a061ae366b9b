"""What is not finite, or costs a step, and harms nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ampscope.analysis.causes.cause_entry import CauseEntry, Occurrence, Reason
from ampscope.trace.vocabulary import Cause, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFell(Reason):
    """Steps were skipped, and the loss scale halved for each."""

    recovered: bool  #: a good step followed


def _harmless(
    cause: Cause, recognised_in: str, *, noun: str, sentence: str | Callable[[Occurrence], str]
) -> CauseEntry:
    return CauseEntry(
        cause=cause,
        noun=noun,
        sentence=sentence,
        severity=Severity.INFO,
        recognised_in=recognised_in,
        cured_by_precision=False,
    )


def _moving(then: str, unfinished: str) -> Callable[[Occurrence], str]:
    """What a scale did: ``then`` where a good step showed that it was enough, ``unfinished`` where the run ended."""

    def sentence(occurrence: Occurrence) -> str:
        reason = occurrence.reason
        ended = isinstance(reason, ScaleFell) and not reason.recovered
        return f"{unfinished if ended else then}: this is how GradScaler works."

    return sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Unexplained(Reason):
    """A step was skipped once, and what made its gradients bad was not found."""

    why: str  #: it was not found; without full stop


def _single_skip(occurrence: Occurrence) -> str:
    reason = occurrence.reason
    because = f" ({reason.why})" if isinstance(reason, Unexplained) and reason.why else ""
    return (
        f"The gradients of one step were not finite, and what made them so is not known{because}. The scaler skipped "
        "that step, and training went on with finite gradients."
    )


ENTRIES = (
    _harmless(
        Cause.BENIGN_INITIAL_CALIBRATION,
        "analysis.scale.skip_runs",
        noun="the scale finding its place",
        sentence=_moving(
            "The loss scale started high and halved until the gradients fit",
            "The loss scale started high and was being halved when what was recorded ends",
        ),
    ),
    _harmless(
        Cause.BENIGN_PERIODIC_GROWTH,
        "analysis.scale.skip_runs",
        noun="the scale probing for room to grow",
        sentence=_moving(
            "The loss scale had grown to probe for room and was halved again",
            "The loss scale had grown to probe for room and was being halved again when what was recorded ends",
        ),
    ),
    _harmless(
        Cause.BENIGN_SCALE_ADJUSTMENT,
        "analysis.scale.skip_runs",
        noun="the scale making room for larger gradients",
        sentence=_moving(
            "Gradients outgrew the loss scale; it was lowered and training went on",
            "Gradients outgrew the loss scale, which was being lowered when what was recorded ends",
        ),
    ),
    _harmless(
        Cause.BENIGN_SINGLE_SKIP,
        "analysis.diagnosis.examiner",
        noun="a single skipped step that is not explained",
        sentence=_single_skip,
    ),
    _harmless(
        Cause.BENIGN_INF_MASK,
        "analysis.diagnosis.harmless_values",
        noun="a mask of -inf, as intended",
        sentence=(
            "{op} writes infinities on purpose, as masks do, and they are gone again before loss, gradients and "
            "buffers."
        ),
    ),
    _harmless(
        Cause.BENIGN_METRIC_NAN,
        "analysis.diagnosis.harmless_values",
        noun="a metric that is NaN and reaches no weight",
        sentence=(
            "{op} makes a non-finite value that no loss, gradient, weight or buffer depends on, as in a metric or a "
            "log."
        ),
    ),
    _harmless(
        Cause.BENIGN_SATURATED,
        "analysis.diagnosis.harmless_values",
        noun="an overflow that saturates",
        sentence=(
            "{op} makes an infinity, and a bounded function such as tanh or sigmoid takes it to its limit, as it would "
            "any number that large."
        ),
    ),
    _harmless(
        Cause.BENIGN_MASKED_INTERNAL,
        "analysis.diagnosis.harmless_values",
        noun="an internal value that is not finite, and masked again",
        sentence=(
            "{op} makes a non-finite value that is masked or replaced before it reaches loss, gradients or buffers."
        ),
    ),
)
