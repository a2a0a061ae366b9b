"""The forms in which usage mistakes show: what is said where the form is known, and the fix that fits it."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.causes import cause_entry
from ampscope.analysis.results import Remedy
from ampscope.trace.vocabulary import MistakeForm, Severity


def in_loop(text: str, code: str) -> Remedy:
    """A change of the loop, which no replay can try."""
    return Remedy(text=text, code=code, untried=cause_entry.LOOP)


#: What is written instead where a framework unscales and steps, by the framework: clipping, and other edits.
CLIPPED_IN_FRAMEWORK: dict[str, Remedy] = {
    "lightning": in_loop(
        text="Clip in this hook of the module: Lightning has unscaled the gradients by then.",
        code="def on_before_optimizer_step(self, optimizer):\n"
        '    self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")',
    ),
    "transformers": in_loop(
        text="Let the Trainer clip: it unscales first.", code="TrainingArguments(..., max_grad_norm=1.0)"
    ),
    "accelerate": in_loop(
        text="Clip with the accelerator: it unscales first.",
        code="accelerator.clip_grad_norm_(model.parameters(), max_norm)",
    ),
    "fabric": in_loop(
        text="Clip with Fabric: it unscales first.",
        code="fabric.clip_gradients(model, optimizer, max_norm=1.0)",
    ),
}
EDITED_IN_FRAMEWORK: dict[str, Remedy] = {
    "lightning": in_loop(
        text="Edit gradients in this hook of the module: Lightning has unscaled them by then, once.",
        code="def on_before_optimizer_step(self, optimizer):\n    ...  # edit the gradients here",
    ),
    "accelerate": in_loop(
        text="Unscale with the accelerator, which knows the optimizer within its own.",
        code="accelerator.unscale_gradients(optimizer)\n...  # edit the gradients here\noptimizer.step()",
    ),
}
SCALED_IN_FRAMEWORK: dict[str, Remedy] = {
    "lightning": in_loop(
        text="Pass the loss as it is: manual_backward scales it, as does automatic optimization.",
        code="self.manual_backward(loss)",
    ),
    "transformers": in_loop(text="Return the loss as it is: the Trainer scales it.", code="return loss"),
    "accelerate": in_loop(
        text="Pass the loss as it is: the accelerator's backward scales it.", code="accelerator.backward(loss)"
    ),
    "fabric": in_loop(text="Pass the loss as it is: Fabric's backward scales it.", code="fabric.backward(loss)"),
}

UNSCALE_FIRST = in_loop(
    text="Unscale first, then look at the gradients or change them.",
    code="scaler.unscale_(optimizer)\n...  # edit the gradients here\nscaler.step(optimizer)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormEntry:
    """Holds what is known of one form of misuse of the scaler or of autocast."""

    sentence: str = ""  #: a text for `filled_in`; empty: that of its cause
    fix: Remedy | None = None  #: None: those of its cause
    refused: bool = False  #: torch refuses it with an error, which ends the loop
    severity: Severity | None = None  #: where it is milder than its cause usually is


FORMS: dict[MistakeForm, FormEntry] = {
    MistakeForm.STEPPED_PAST_SCALER: FormEntry(
        sentence="optimizer.step() ran on gradients that still carry the loss scale.",
        fix=in_loop(
            text="Step through the scaler, which unscales first.", code="scaler.step(optimizer)\nscaler.update()"
        ),
    ),
    MistakeForm.UNSCALED_BY_HAND: FormEntry(
        sentence=(
            "The loop has divided the loss scale out of the gradients already; the scaler divides by it a second time."
        ),
        fix=in_loop(
            text="Leave unscaling to the scaler.",
            code="scaler.unscale_(optimizer)  # instead of dividing by scaler.get_scale()\nscaler.step(optimizer)",
        ),
    ),
    MistakeForm.LOSS_OF_SCALED_GRADIENTS: FormEntry(
        sentence=(
            "This loss is computed from gradients of a scaled loss that were not unscaled, so its weight grows with "
            "the loss scale.{told.kept}"
        ),
        fix=in_loop(
            text="Unscale the gradients before they enter the loss.",
            code="inv = 1.0 / scaler.get_scale()\ngrads = [g * inv for g in grads]",
        ),
    ),
    MistakeForm.DECISION_ON_SCALED: FormEntry(
        sentence=(
            "What is compared here is computed from gradients that still carry the loss scale, so the threshold means "
            "something else whenever the scale moves.{told.kept}"
        ),
        fix=UNSCALE_FIRST,
    ),
    MistakeForm.KEPT_OF_SCALED: FormEntry(
        sentence=(
            "What this line uses was computed from gradients that still carried the loss scale, so it is another value "
            "whenever the scale moves; what it is used for does not carry the scale.{told.kept}"
        ),
        fix=in_loop(
            text="Unscale first, then compute of the gradients what is kept or used later.",
            code="scaler.unscale_(optimizer)\naverage.update(grad_norm(model))  # not before\nscaler.step(optimizer)",
        ),
    ),
    MistakeForm.UNSCALE_EACH_MICROBATCH: FormEntry(
        sentence=(
            "unscale_ is called for every micro-batch: torch refuses the second call, and gradients that are unscaled "
            "cannot be added to. It belongs once after the last backward."
        ),
        refused=True,
    ),
    MistakeForm.UNSCALE_TWICE: FormEntry(
        sentence="unscale_ is called twice for one step of the same optimizer, which torch refuses.",
        fix=UNSCALE_FIRST,
        refused=True,
    ),
    MistakeForm.UNSCALED_FOR_ANOTHER: FormEntry(
        sentence=(
            "The scaler divides these gradients by its scale a second time, so the update shrinks by as much. unscale_ "
            "had run already, for another object that holds the same parameters (such as a framework's wrapper of the "
            "optimizer) or before an update(); torch counts by object, and until update()."
        ),
        fix=in_loop(
            text="Unscale once, with the very object that steps.",
            code="scaler.unscale_(optimizer)\n...  # edit the gradients here\nscaler.step(optimizer)",
        ),
    ),
    MistakeForm.SCALED_TWICE: FormEntry(
        sentence=(
            "This loss has been scaled already, and is scaled a second time; unscaling divides once, so the update is "
            "too large by the scale."
        ),
        fix=in_loop(text="Scale the loss once.", code="scaler.scale(loss).backward()\nscaler.step(optimizer)"),
    ),
    MistakeForm.UPDATE_MISSING: FormEntry(
        sentence=(
            "The optimizer has stepped, and update() was not called since: torch refuses to unscale or step again "
            "before it, also when a step was left out on purpose."
        ),
        fix=in_loop(
            text="Call update() once in every iteration in which unscale_ or step ran, also when the step is left out.",
            code="scaler.step(optimizer)\nscaler.update()",
        ),
        refused=True,
    ),
    MistakeForm.NOTHING_TO_UPDATE: FormEntry(
        sentence=(
            "update() was called although no gradient was unscaled since the last update, which torch refuses: it "
            "belongs once after scaler.step(), not after every backward."
        ),
        refused=True,
    ),
    MistakeForm.UPDATE_IN_BETWEEN: FormEntry(
        sentence=(
            "update() ran between backward and this optimizer's step: each time it changes the scale, the gradients "
            "are divided by another scale than they were multiplied with. Call it once, after every optimizer has "
            "stepped."
        ),
        fix=in_loop(
            text="Step every optimizer, then update once. Where a framework updates with each step of its optimizers, "
            "let every model's backward come just before its own step.",
            code="scaler.step(first)\nscaler.step(second)\nscaler.update()",
        ),
    ),
    MistakeForm.ANOTHER_SCALER: FormEntry(
        sentence=(
            "The gradients that this scaler divides were scaled by another one. A loss, the gradients that it leaves "
            "and their optimizer belong to one scaler."
        ),
        fix=in_loop(
            text="Scale, unscale, step and update with one scaler.",
            code="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
        ),
    ),
    MistakeForm.LOSS_NOT_SCALED: FormEntry(
        sentence=(
            "The scaler divides gradients of a loss that was never scaled, so they shrink by the whole scale. Every "
            "loss whose gradients it steps has to go through scaler.scale()."
        ),
        fix=in_loop(
            text="Scale every loss before its backward.",
            code="scaler.scale(other_loss).backward()\nscaler.step(optimizer)",
        ),
    ),
    MistakeForm.NOTHING_SCALED: FormEntry(
        sentence=(
            "The scaler has scaled no loss, and torch refuses to unscale gradients or to step an optimizer with it "
            "then. The loss has to go through scaler.scale() before its backward."
        ),
        fix=in_loop(
            text="Scale the loss before its backward.",
            code="scaler.scale(loss).backward()\nscaler.step(optimizer)",
        ),
        refused=True,
    ),
    MistakeForm.NO_SCALER: FormEntry(),
    MistakeForm.ALL_FROZEN: FormEntry(
        sentence=(
            "All of the optimizer's {told.whose} have requires_grad=False, so its first {seen.attempts:,} steps moved "
            "nothing."
        ),
        fix=in_loop(
            text="Give the optimizer the parameters that are to be trained, and let them require gradients.",
            code="head.requires_grad_(True)\n"
            "optimizer = Optimizer([p for p in model.parameters() if p.requires_grad], lr=lr)",
        ),
    ),
    MistakeForm.NO_GRADIENT: FormEntry(
        sentence=(
            "No gradient reached the optimizer's {told.whose} in its first {seen.attempts:,} steps: the loss has no "
            "history that leads to them. detach(), .data, .item(), NumPy or torch.no_grad() on the way cuts it off."
        ),
        fix=in_loop(
            text="Compute the loss from what the model returned, without cutting it off from its history.",
            code="output = model(x)  # no .detach(), .data, .item() or no_grad() on the way to the loss\n"
            "loss = loss_fn(output, y)",
        ),
    ),
    MistakeForm.GRADIENTS_ZEROED: FormEntry(
        sentence=(
            "Backward gives the optimizer's {told.whose} gradients, but they are zero or gone when it steps, in its "
            "first {seen.attempts:,} steps: a line between backward and the step clears them, or multiplies them by "
            "zero, as 1 / norm does if the norm is infinite."
        ),
        fix=in_loop(
            text="Leave the gradients as they are between backward and the step, and clip by a norm that is finite.",
            code="loss.backward()\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)\n"
            "optimizer.step()\noptimizer.zero_grad()",
        ),
    ),
    MistakeForm.OTHER_PARAMETERS: FormEntry(
        sentence=(
            "The optimizer that steps holds other parameters than the watched model's {told.whose}: backward gives "
            "gradients to the model's, and the optimizer's own have none. It was made for a copy of the model, or "
            "before the model got its present parameters."
        ),
        fix=in_loop(
            text="Make the optimizer last, for the very model that is called and watched.",
            code="optimizer = Optimizer(model.parameters(), lr=lr)",
        ),
    ),
    MistakeForm.ZERO_GRADIENTS: FormEntry(
        sentence=(
            "Every gradient of the optimizer's {told.whose} was exactly zero in its first {seen.attempts:,} steps, as "
            "backward gave it: the loss does not depend on them, or is multiplied by zero."
        ),
    ),
    MistakeForm.ROUNDED_AWAY: FormEntry(
        sentence=(
            "The optimizer's {told.whose} get gradients, and after {seen.attempts:,} steps all of them are as they "
            "were, to the last bit: the updates are so small that adding them changes nothing."
        ),
        fix=in_loop(
            text="Raise the learning rate.", code='for group in optimizer.param_groups:\n    group["lr"] = 1e-3'
        ),
    ),
    MistakeForm.NO_LEARNING_RATE: FormEntry(
        sentence="The learning rate was exactly zero in all of the {seen.attempts:,} steps, so no weight has moved.",
        fix=in_loop(
            text="Look at the schedule: it gives zero at every step, as an integer division or a warm-up that is never "
            "stepped does.",
            code="print(scheduler.get_last_lr())",
        ),
    ),
    MistakeForm.LEARNING_RATE_ENDED: FormEntry(
        sentence=(
            "The learning rate is exactly zero in the last {seen.attempts:,} steps of the run: the optimizer moves no "
            "weight in them."
        ),
        fix=in_loop(
            text="Let the schedule end with the loop: count its steps as the loop does, or end it above zero.",
            code="print(scheduler.get_last_lr())",
        ),
        severity=Severity.WARNING,
    ),
    MistakeForm.CAST_AND_BACK: FormEntry(
        sentence=(
            "This line casts {seen.half:,} of {seen.of:,} parameters that are trained to {seen.dtype}, and training "
            "goes on with them after they were cast back: what the updates before had changed by less than a spacing "
            "of {seen.dtype} is lost."
        ),
        fix=in_loop(
            text="Cast a copy for what needs half precision (a validation, an export), or run the model under "
            "autocast.",
            code="pipeline = copy.deepcopy(model).to(torch.float16)",
        ),
        severity=Severity.WARNING,
    ),
    MistakeForm.AUTOCAST_SWITCHED_OFF: FormEntry(
        sentence=(
            "The autocast region is for CUDA, which is not available: torch has switched the region off{told.scaler}. "
            "{told.ran}"
        )
    ),
    MistakeForm.AUTOCAST_ELSEWHERE: FormEntry(
        sentence="The autocast region is for {seen.device}; the model is on {seen.tensors}. {told.ran}"
    ),
    MistakeForm.AUTOCAST_OUTSIDE: FormEntry(
        sentence=(
            "No op of the model ran inside an autocast region that is on: there is none, it was made with "
            "enabled=False, or it is left before the model is called. {told.ran}"
        )
    ),
    MistakeForm.AUTOCAST_FLOAT32: FormEntry(
        sentence="Of what runs inside the autocast region autocast casts nothing. {told.ran}",
        fix=in_loop(
            text="Leave autocast and the scaler out: this model has nothing to gain.",
            code="loss = loss_fn(model(x), y)",
        ),
    ),
}
