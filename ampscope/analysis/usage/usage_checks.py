"""What is checked of a loop's use of autocast and the scaler, and what came out."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.results import Diagnosis
from ampscope.trace.vocabulary import Cause

#: For each mistake what a correct loop does instead, in the order of a step.
_CORRECT: dict[Cause, str] = {
    Cause.HALF_PARAMS: "The parameters are float32; autocast alone chooses half precision",
    Cause.MISUSE_AUTOCAST_SPANS_STEP: "The autocast region ends before the optimizer steps",
    Cause.MISUSE_CHECKPOINT_AUTOCAST_MISMATCH: "Checkpointed blocks are recomputed in the precision of their forward",
    Cause.MISUSE_MISSING_SCALER: "A loss computed in float16 is scaled",
    Cause.MISUSE_BACKWARD_UNDER_AUTOCAST: "backward() runs outside the autocast region",
    Cause.MISUSE_CLIP_BEFORE_UNSCALE: "Gradients are unscaled before they are clipped",
    Cause.MISUSE_NO_UNSCALE: "Nothing else reads or changes gradients that still carry the loss scale",
    Cause.MISUSE_UPDATE_EACH_MICROBATCH: "scaler.update() comes once for each optimizer step",
    Cause.MISUSE_MULTIPLE_SCALERS_UPDATE: "A step's loss and gradients are scaled and unscaled by the same factor",
    Cause.MISUSE_SCHEDULER_ORDER: "The learning rate stands still when a step is skipped",
    Cause.MISUSE_SCALER_STATE_NOT_RESTORED: "A resumed run goes on with the scale that it had",
}
#: Checks that say nothing about a loop without a scaler.
_OF_SCALERS = frozenset(
    {
        Cause.MISUSE_CLIP_BEFORE_UNSCALE,
        Cause.MISUSE_NO_UNSCALE,
        Cause.MISUSE_UPDATE_EACH_MICROBATCH,
        Cause.MISUSE_MULTIPLE_SCALERS_UPDATE,
        Cause.MISUSE_SCHEDULER_ORDER,
        Cause.MISUSE_SCALER_STATE_NOT_RESTORED,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that a correct loop does."""

    cause: Cause  #: what the mistake is called
    words: str  #: what a correct loop does, as a sentence without full stop
    found: int  #: places where this one does not
    applies: bool  #: whether the run could show the mistake at all

    @property
    def passed(self) -> bool:
        """Whether the loop does it right, as far as the run can show."""
        return self.applies and not self.found


def usage_checks(diagnosis: Diagnosis) -> tuple[Check, ...]:
    """Every check of the use of autocast and the scaler, in the order of a step."""
    has_scaler = bool(diagnosis.scale)
    told = [finding.cause for finding in diagnosis.findings]
    return tuple(
        Check(
            cause=cause,
            words=words,
            found=told.count(cause),
            applies=has_scaler or cause not in _OF_SCALERS or cause in told,
        )
        for cause, words in _CORRECT.items()
    )
