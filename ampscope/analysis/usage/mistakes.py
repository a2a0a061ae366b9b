"""What each usage mistake is and its fix, in words and two lines of code."""

from __future__ import annotations

from typing import Any

from ampscope.analysis.cures.remedies import remedies
from ampscope.analysis.results import Remedy
from ampscope.analysis.words.scale_words import in_words
from ampscope.trace.vocabulary import Cause, MistakeForm, Severity

#: Mistakes that cost steps or time, where the others spoil what is learnt.
_WARNINGS = frozenset({Cause.MISUSE_SCHEDULER_ORDER, Cause.MISUSE_SCALER_STATE_NOT_RESTORED})

_EXPLAINED: dict[Cause, str] = {
    Cause.MISUSE_CLIP_BEFORE_UNSCALE: (
        "The gradients still carry the loss scale here, so the clipping threshold is compared with a norm that is "
        "too large by that factor, and the update shrinks by as much."
    ),
    Cause.MISUSE_NO_UNSCALE: (
        "The gradients still carry the loss scale here, so what is done with them depends on it: the same line does "
        "something else whenever the scale moves."
    ),
    Cause.MISUSE_UPDATE_EACH_MICROBATCH: (
        "update() ends an optimizer step. Called for every micro-batch, the next backward adds scaled gradients to "
        "gradients that are already unscaled, and unscale_ divides the older ones again."
    ),
    Cause.MISUSE_BACKWARD_UNDER_AUTOCAST: (
        "backward ran inside the autocast block, so backward ops whose forward was kept in float32 are cast to half "
        "precision too, with the scaled gradient as operand."
    ),
    Cause.MISUSE_AUTOCAST_SPANS_STEP: (
        "The autocast region is not left between optimizer steps. Autocast keeps the weights it has cast until the "
        "region ends, so the next forward runs on half-precision copies of the old weights."
    ),
    Cause.MISUSE_MULTIPLE_SCALERS_UPDATE: (
        "Gradients are unscaled with another scale than their loss was scaled with: update() changed it in between, "
        "or another scaler did the scaling. Call update() once, after every optimizer has stepped, on the one scaler."
    ),
    Cause.HALF_PARAMS: (
        "The parameters themselves are float16, so their gradients are too, and a GradScaler cannot unscale those. "
        "Autocast wants float32 parameters and casts them op by op."
    ),
    Cause.MISUSE_CHECKPOINT_AUTOCAST_MISMATCH: (
        "A checkpointed block is recomputed in backward in another precision than it ran in forward, so the gradients "
        "belong to other activations than the loss."
    ),
    Cause.MISUSE_MISSING_SCALER: "The forward runs in float16 but the loss is not scaled: small gradients become 0.",
    Cause.MISUSE_SCHEDULER_ORDER: (
        "The scheduler stepped although the optimizer step before had been skipped: the schedule advances without "
        "training."
    ),
    Cause.MISUSE_SCALER_STATE_NOT_RESTORED: (
        "The optimizer goes on where it was, but its scaler starts afresh and loses steps to calibrate a second time."
    ),
}

#: Where it is known more exactly what happened.
_FORMS: dict[MistakeForm, str] = {
    MistakeForm.STEPPED_PAST_SCALER: "optimizer.step() ran on gradients that still carry the loss scale.",
    MistakeForm.UNSCALED_BY_HAND: (
        "The loop has divided the loss scale out of the gradients already; the scaler divides by it a second time."
    ),
    MistakeForm.LOSS_OF_SCALED_GRADIENTS: (
        "This loss is computed from gradients of a scaled loss that were not unscaled, so its weight grows with the "
        "loss scale."
    ),
    MistakeForm.DECISION_ON_SCALED: (
        "What is compared here is computed from gradients that still carry the loss scale, so the threshold means "
        "something else whenever the scale moves."
    ),
    MistakeForm.UNSCALE_EACH_MICROBATCH: (
        "unscale_ is called for every micro-batch: torch refuses the second call, and gradients that are unscaled "
        "cannot be added to. It belongs once after the last backward."
    ),
    MistakeForm.UNSCALE_TWICE: "unscale_ is called twice for one step of the same optimizer, which torch refuses.",
    MistakeForm.UPDATE_MISSING: (
        "The optimizer has stepped, and update() was not called since: torch refuses to unscale or step again before "
        "it, also when a step was left out on purpose."
    ),
    MistakeForm.NOTHING_TO_UPDATE: (
        "update() was called although no gradient was unscaled since the last update, which torch refuses: it belongs "
        "once after scaler.step(), not after every backward."
    ),
    MistakeForm.UPDATE_IN_BETWEEN: (
        "update() changed the scale between backward and this optimizer's step, so its gradients are divided by "
        "another scale than they were multiplied with. Call it once, after every optimizer has stepped."
    ),
    MistakeForm.ANOTHER_SCALER: (
        "The gradients that this scaler divides were scaled by another one. A loss, the gradients that it leaves and "
        "their optimizer belong to one scaler."
    ),
    MistakeForm.LOSS_NOT_SCALED: (
        "The scaler divides gradients of a loss that was never scaled, so they shrink by the whole scale. Every loss "
        "whose gradients it steps has to go through scaler.scale()."
    ),
}

_UNSCALE_FIRST = Remedy(
    text="Unscale first, then look at the gradients or change them.",
    code="scaler.unscale_(optimizer)\n...  # edit the gradients here\nscaler.step(optimizer)",
)
_FIXES: dict[MistakeForm, Remedy] = {
    MistakeForm.UNSCALED_BY_HAND: Remedy(
        text="Leave unscaling to the scaler.",
        code="scaler.unscale_(optimizer)  # instead of dividing by scaler.get_scale()\nscaler.step(optimizer)",
    ),
    MistakeForm.LOSS_OF_SCALED_GRADIENTS: Remedy(
        text="Unscale the gradients before they enter the loss.",
        code="inv = 1.0 / scaler.get_scale()\ngrads = [g * inv for g in grads]",
    ),
    MistakeForm.DECISION_ON_SCALED: _UNSCALE_FIRST,
    MistakeForm.UNSCALE_TWICE: _UNSCALE_FIRST,
    MistakeForm.UPDATE_MISSING: Remedy(
        text="Call update() once in every iteration in which unscale_ or step ran, also when the step is left out.",
        code="scaler.step(optimizer)\nscaler.update()",
    ),
    MistakeForm.ANOTHER_SCALER: Remedy(
        text="Scale, unscale, step and update with one scaler.",
        code="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
    ),
    MistakeForm.LOSS_NOT_SCALED: Remedy(
        text="Scale every loss before its backward.", code="scaler.scale(other_loss).backward()\nscaler.step(optimizer)"
    ),
}

#: What torch refuses with an error, which ends the loop.
_REFUSED = frozenset(
    {
        MistakeForm.UNSCALE_EACH_MICROBATCH,
        MistakeForm.UNSCALE_TWICE,
        MistakeForm.UPDATE_MISSING,
        MistakeForm.NOTHING_TO_UPDATE,
    }
)


def happens_once(cause: Cause, form: MistakeForm | None) -> bool:
    """Whether a mistake is a single event; any other is a line of the loop, which comes round again."""
    return cause is Cause.MISUSE_SCALER_STATE_NOT_RESTORED or form in _REFUSED


def severity(cause: Cause) -> Severity:
    """How much a mistake matters."""
    return Severity.WARNING if cause in _WARNINGS else Severity.ERROR


def explained(cause: Cause, form: MistakeForm | None, evidence: dict[str, Any]) -> str:
    """What is wrong about it, with the numbers that the evidence holds."""
    if evidence.get("was") is not None:
        return (
            f"A new scaler took over without the old one's state: it starts at {in_words(evidence['starts'])} where "
            f"the run had come to {in_words(evidence['was'])}, and loses steps to calibrate a second time."
        )
    if evidence.get("optimizer_steps"):
        return (
            f"The optimizer was restored after {evidence['optimizer_steps']:,} steps, but the scaler starts afresh and "
            "loses steps to calibrate a second time."
        )
    text = (form and _FORMS.get(form)) or _EXPLAINED.get(cause)
    return text or f"evidence: {evidence}"


def fixes(cause: Cause, form: MistakeForm | None, evidence: dict[str, Any]) -> tuple[Remedy, ...]:
    """What to write instead."""
    fix = _FIXES.get(form) if form else None
    if form is None and cause is Cause.MISUSE_NO_UNSCALE and not evidence:
        fix = _UNSCALE_FIRST
    return (fix,) if fix is not None else remedies(cause)
