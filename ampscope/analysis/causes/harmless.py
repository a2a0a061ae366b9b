"""What is not finite, or costs a step, and harms nothing."""

from __future__ import annotations

from ampscope.analysis.causes.cause_entry import CauseEntry
from ampscope.trace.vocabulary import Cause, Severity


def _harmless(cause: Cause, recognised_in: str, *, noun: str, sentence: str) -> CauseEntry:
    return CauseEntry(
        cause=cause,
        noun=noun,
        sentence=sentence,
        severity=Severity.INFO,
        recognised_in=recognised_in,
        cured_by_precision=False,
    )


ENTRIES = (
    _harmless(
        Cause.BENIGN_INITIAL_CALIBRATION,
        "analysis.scale.skip_runs",
        noun="the scale finding its place",
        sentence="The loss scale started high and halved until the gradients fit: this is how GradScaler works.",
    ),
    _harmless(
        Cause.BENIGN_PERIODIC_GROWTH,
        "analysis.scale.skip_runs",
        noun="the scale probing for room to grow",
        sentence="The loss scale had grown to probe for room and was halved again: this is how GradScaler works.",
    ),
    _harmless(
        Cause.BENIGN_SCALE_ADJUSTMENT,
        "analysis.scale.skip_runs",
        noun="the scale making room for larger gradients",
        sentence="Gradients outgrew the loss scale; it was lowered and training went on: this is how GradScaler works.",
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
