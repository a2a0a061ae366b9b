"""Mistakes in how a loop uses autocast and the scaler, in the order of a step: what is wrong, and what is right.

Capture recognises them while the loop runs, so their noun phrases stand where capture can read them too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ampscope.analysis.causes import cause_entry
from ampscope.analysis.causes.cause_entry import USE_BFLOAT16, CauseEntry, Match, Occurrence, OpRule, Reason, Turn
from ampscope.analysis.causes.usage_forms import UNSCALE_FIRST, in_loop
from ampscope.analysis.op_facts import Executed, divides_by_what_was_zero
from ampscope.analysis.results import Remedy
from ampscope.analysis.words import in_words
from ampscope.trace.dtypes import HALF_DTYPES
from ampscope.trace.evidence import NO_EVIDENCE, FindingEvidence
from ampscope.trace.schema import Change, Phase
from ampscope.trace.vocabulary import MISTAKES_IN_WORDS, Cause, Severity

_AFTER_SKIP = "although the optimizer step before had been skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfState(Reason):
    """Parameters and optimizer state are half precision."""

    dtype: str

    def explanation(self, occurrence: Occurrence, /) -> str:
        """States in which dtype the optimizer computes, and which op failed in it."""
        made = f"{occurrence.op_in_words} made a number that is not finite in it"
        return f"The optimizer computes in {self.dtype}, and {made}."


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateMoved(Reason):
    """The learning rate moved on after skipped steps."""

    steps: int  #: how many; 0: none that shows in the rates
    of: int  #: attempts
    matters: bool  #: whether they are more than a few of them

    def explanation(self, _: Occurrence, /) -> str:
        """States by how many steps the schedule is ahead."""
        if not self.steps:
            ahead = "the schedule is ahead of the training, which has not moved a recorded learning rate"
            return f"The scheduler stepped {_AFTER_SKIP}: {ahead}."
        moved = f"The learning rate moved on {'once' if self.steps == 1 else f'{self.steps:,} times'} {_AFTER_SKIP}"
        few = "" if self.matters else ", too few to matter"
        return f"{moved}: the schedule is {self.steps:,} of {self.of:,} steps ahead of the training{few}."


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleForgotten(Reason):
    """A new scaler took the place of one whose scale the run had found."""

    was: float
    starts: float

    def explanation(self, _: Occurrence, /) -> str:
        """States from which scale the new one starts, and to which the run had come."""
        return (
            f"A new scaler took over without the old one's state: it starts at {in_words(self.starts)} where "
            f"the run had come to {in_words(self.was)}, and has to find its place a second time."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MistakeSeen(Reason):
    """A mistake in the loop, as capture or the run's history has it."""

    seen: FindingEvidence = NO_EVIDENCE
    ops: tuple[tuple[str, int], ...] = ()  #: of the traced steps, by the dtype that they gave

    @property
    def whose(self) -> str:
        """The parameters in words."""
        count = self.seen.count
        named = ", ".join(self.seen.parameters[:3]) + (", ..." if count > 3 else "")
        what = "parameter" if count == 1 else f"{count:,} parameters"
        return f"{what} ({named})" if named else "parameters"

    @property
    def scaler(self) -> str:
        """Adds what the scaler does where torch has switched a region off."""
        return ", and so is the GradScaler" if self.seen.scaler_is_off else ""

    @property
    def kept(self) -> str:
        """Adds which line made of scaled gradients what is used iterations later."""
        return f" {self.seen.kept_by} made it of scaled gradients in an earlier iteration." if self.seen.kept_by else ""

    @property
    def ran(self) -> str:
        """The dtypes of the ops, in a sentence."""
        total = sum(count for _, count in self.ops)
        shares = ", ".join(f"{count / total:.0%} in {dtype}" for dtype, count in self.ops)
        ran = f"Of {total:,} ops in the traced steps none ran in half precision: {shares}."
        return ran if total else "No op runs in half precision."


def without_effect(text: str) -> Callable[[Occurrence], str]:
    """The sentence of a cause from a text for `filled_in`."""
    return lambda occurrence: filled_in(text, occurrence.reason)


def filled_in(text: str, reason: Reason) -> str:
    """A text that may name fields of what was ``seen``, and what a `MistakeSeen` has ``told`` of it."""
    told = reason if isinstance(reason, MistakeSeen) else MistakeSeen()
    return text.format(seen=told.seen, told=told)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageEntry(CauseEntry):
    """All that is known of one usage mistake."""

    noun: str = field(init=False)  #: as capture reads it, too
    recognised_in: str = "capture"
    correct: str  #: what a correct loop does instead, as a sentence without full stop
    of_scaler: bool = False  #: a loop without a scaler cannot make it
    happens_once: bool = False  #: a single event; any other is a line of the loop, which comes round again

    def __post_init__(self) -> None:
        object.__setattr__(self, "noun", MISTAKES_IN_WORDS[self.cause])


def _half_state(op: Executed) -> Match | None:
    half = op.dtype in HALF_DTYPES and not divides_by_what_was_zero(op)
    return Match(Cause.HALF_PARAMS, HalfState(dtype=op.dtype)) if half else None


def _half_parameters(occurrence: Occurrence) -> str:
    seen = occurrence.reason.seen if isinstance(occurrence.reason, MistakeSeen) else NO_EVIDENCE
    if seen.cast:
        return (
            f"{seen.half:,} of the optimizer's {seen.of:,} parameters with gradients were not float16 at "
            "the step before, and are now: something in between cast them, as .half() or .to(dtype) does with "
            "every module that holds them. A GradScaler cannot unscale float16 gradients."
        )
    return occurrence.reason.explanation(occurrence) or (
        "The parameters themselves are float16, so their gradients are too, and a GradScaler cannot unscale those. "
        "Autocast wants float32 parameters and casts them op by op."
    )


def _against_half_parameters(occurrence: Occurrence) -> tuple[Remedy, ...]:
    if isinstance(occurrence.reason, MistakeSeen) and occurrence.reason.seen.cast:
        text = "Cast a copy for what needs half precision (a validation, an export), or run the model under autocast."
        return (cause_entry.advice(cause_entry.BEFORE, text, "pipeline = copy.deepcopy(model).to(torch.float16)"),)
    text = "Keep the parameters in float32 and let autocast choose the precision of each op."
    code = "model.float()\nwith torch.autocast(device_type, dtype=torch.float16):\n    loss = step(batch)"
    return (cause_entry.advice(cause_entry.BEFORE, text, code, Change.FP32),)


def _scaler_starts_afresh(occurrence: Occurrence) -> str:
    reason = occurrence.reason
    if isinstance(reason, MistakeSeen) and reason.seen.optimizer_steps:
        return (
            f"The optimizer was restored after {reason.seen.optimizer_steps:,} steps, but the scaler starts afresh and "
            "loses steps to calibrate a second time."
        )
    return reason.explanation(occurrence) or (
        "The optimizer goes on where it was, but its scaler starts afresh and has to find its place a second time."
    )


_ONCE_A_STEP = in_loop(
    text="Unscale, step and update once per optimizer step, after the last micro-batch.",
    code="if (i + 1) % accumulation == 0:\n    scaler.unscale_(optimizer)\n"
    "    scaler.step(optimizer)\n    scaler.update()",
)

ENTRIES = (
    UsageEntry(
        cause=Cause.HALF_PARAMS,
        recognised_in="",
        correct="The parameters are float32; autocast alone chooses half precision",
        sentence=_half_parameters,
        remedies=_against_half_parameters,
        rules=(OpRule(Turn.OPTIMIZER_DTYPE, _half_state, Phase.OPTIMIZER),),
    ),
    UsageEntry(
        cause=Cause.MISUSE_AUTOCAST_SPANS_STEP,
        correct="The autocast region ends before the optimizer steps",
        sentence=(
            "The autocast region is not left between optimizer steps. Autocast keeps the weights it has cast until the "
            "region ends, so the next forward runs on half-precision copies of the old weights."
        ),
        remedies=(
            in_loop(
                text="Open the autocast block anew for each forward, and leave it before backward.",
                code="for x, y in loader:\n    with torch.autocast(device_type, dtype=torch.float16):\n"
                "        loss = loss_fn(model(x), y)",
            ),
        ),
    ),
    UsageEntry(
        cause=Cause.MISUSE_CHECKPOINT_AUTOCAST_MISMATCH,
        correct="Checkpointed blocks are recomputed in the precision of their forward",
        sentence=(
            "A checkpointed block is recomputed in backward in another precision than it ran in forward, so the "
            "gradients belong to other activations than the loss."
        ),
        remedies=(
            in_loop(
                text="Use torch's checkpoint, which restores the autocast state, or restore it in your own.",
                code="from torch.utils.checkpoint import checkpoint\ny = checkpoint(block, x, use_reentrant=False)",
            ),
        ),
        recognised_in="analysis.usage.findings",
    ),
    UsageEntry(
        cause=Cause.MISUSE_MISSING_SCALER,
        correct="A loss computed in float16 is scaled",
        sentence=(
            "The forward runs in float16 but the loss is not scaled: a gradient below float16's smallest number, "
            "6e-08, becomes 0 on its way back."
        ),
        remedies=(
            in_loop(
                text="Scale the loss, so that small gradients fit float16.",
                code="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
            ),
            replace(USE_BFLOAT16, untried=cause_entry.LOOP),
        ),
    ),
    UsageEntry(
        cause=Cause.MISUSE_BACKWARD_UNDER_AUTOCAST,
        correct="backward() runs outside the autocast region",
        sentence=(
            "backward ran inside the autocast block, so backward ops whose forward was kept in float32 are cast to "
            "half precision too, with the scaled gradient as operand."
        ),
        remedies=(
            in_loop(
                text="End the autocast block before backward.",
                code="with torch.autocast(device_type, dtype=torch.float16):\n    loss = loss_fn(model(x), y)\n"
                "scaler.scale(loss).backward()",
            ),
        ),
    ),
    UsageEntry(
        cause=Cause.MISUSE_CLIP_BEFORE_UNSCALE,
        correct="After backward, gradients are unscaled before they are clipped",
        sentence=(
            "The gradients still carry the loss scale here, so the clipping threshold is compared with a norm that is "
            "too large by that factor, and the update shrinks by as much."
        ),
        remedies=(
            in_loop(
                text="Unscale before clipping.",
                code="scaler.unscale_(optimizer)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
            ),
        ),
        of_scaler=True,
    ),
    UsageEntry(
        cause=Cause.MISUSE_NO_UNSCALE,
        correct="After backward, nothing else reads or changes gradients that still carry the loss scale",
        sentence=(
            "The gradients still carry the loss scale here, so what is done with them depends on it: the same line "
            "does something else whenever the scale moves."
        ),
        remedies=(UNSCALE_FIRST,),
        of_scaler=True,
    ),
    UsageEntry(
        cause=Cause.MISUSE_UPDATE_EACH_MICROBATCH,
        correct="scaler.update() comes once for each optimizer step",
        sentence=(
            "update() ends an optimizer step. Called for every micro-batch, the next backward adds scaled gradients to "
            "gradients that are already unscaled, and unscale_ divides the older ones again."
        ),
        remedies=(_ONCE_A_STEP,),
        of_scaler=True,
    ),
    UsageEntry(
        cause=Cause.MISUSE_MULTIPLE_SCALERS_UPDATE,
        correct="A step's loss and gradients are scaled and unscaled by the same factor",
        sentence=(
            "Gradients are unscaled with another scale than their loss was scaled with: update() changed it in "
            "between, or another scaler did the scaling. Call update() once, after every optimizer has stepped, on "
            "the one scaler."
        ),
        remedies=(_ONCE_A_STEP,),
        of_scaler=True,
    ),
    UsageEntry(
        cause=Cause.MISUSE_GRADIENTS_KEPT,
        correct="Gradients are cleared after each step, also after one that the scaler skips",
        of_scaler=True,
        sentence=(
            "The scaler skipped a step because its gradients were not finite, and nothing cleared them: the next "
            "backward adds to them, an infinity plus anything is not finite, and each step from then on is skipped, at "
            "whatever loss scale."
        ),
        remedies=(
            in_loop(
                text="Clear the gradients after each step, in the branch of a skipped one too.",
                code="scaler.step(optimizer)\nscaler.update()\noptimizer.zero_grad()",
            ),
        ),
    ),
    UsageEntry(
        cause=Cause.MISUSE_GRADIENTS_CLEARED,
        correct="Gradients are cleared before backward or after the step, never between",
        sentence="The gradients that backward left were cleared before the optimizer could step with them.",
        remedies=(in_loop(text="Clear gradients only after the step.", code="scaler.update()\noptimizer.zero_grad()"),),
        of_scaler=True,
    ),
    UsageEntry(
        cause=Cause.MISUSE_SCHEDULER_ORDER,
        correct="The learning rate stands still when a step is skipped",
        sentence=f"The scheduler stepped {_AFTER_SKIP}: the schedule advances without training.",
        remedies=(
            in_loop(
                text="Step the scheduler only when the optimizer stepped: the scale drops when it did not.",
                code="before = scaler.get_scale()\nscaler.step(optimizer)\nscaler.update()\n"
                "if scaler.get_scale() >= before:\n    scheduler.step()",
            ),
        ),
        severity=Severity.WARNING,  # costs steps, and spoils nothing that was learnt
        of_scaler=True,
    ),
    UsageEntry(
        cause=Cause.MISUSE_SCALER_STATE_NOT_RESTORED,
        correct="A resumed run goes on with the scale that it had",
        sentence=_scaler_starts_afresh,
        remedies=(
            in_loop(
                text="Save and load the scaler with the model and the optimizer.",
                code='checkpoint["scaler"] = scaler.state_dict()\n...\nscaler.load_state_dict(checkpoint["scaler"])',
            ),
        ),
        severity=Severity.WARNING,  # costs steps, and spoils nothing that was learnt
        of_scaler=True,
        happens_once=True,
    ),
    UsageEntry(
        cause=Cause.MISUSE_SCALER_EACH_STEP,
        correct="One scaler serves the whole training",
        sentence=(
            "Each step has a new scaler, which starts at the same loss scale as the one before: what one learns of an "
            "overflow is lost with it, and the scale never moves."
        ),
        remedies=(
            in_loop(
                text="Make the scaler once, before the loop.",
                code="scaler = torch.amp.GradScaler(device_type)\nfor x, y in loader:\n    ...",
            ),
        ),
        of_scaler=True,
    ),
    UsageEntry(
        cause=Cause.NOTHING_TRAINS,
        correct="Gradients reach the optimizer's parameters, and its steps move them",
        sentence="The optimizer steps, and trains nothing.",
        remedies=(
            in_loop(
                text="Follow one step by hand: which parameters get a gradient, and which of them move.",
                code="before = [p.detach().clone() for p in model.parameters()]\nloss.backward()\noptimizer.step()\n"
                "for (name, p), old in zip(model.named_parameters(), before):\n"
                "    print(name, p.grad is not None, (p != old).any().item())",
            ),
        ),
        happens_once=True,
    ),
    UsageEntry(
        cause=Cause.GRADIENTS_NOT_CLEARED,
        correct="Gradients are cleared once for each optimizer step",
        sentence=without_effect(
            "Backward adds to gradients, and nothing has cleared them for {seen.attempts:,} steps: each step is made "
            "with the sum of the gradients of all batches so far, most of which belong to weights that are long gone."
        ),
        remedies=(
            in_loop(
                text="Clear the gradients before the backward of each step, or right after the step.",
                code="optimizer.zero_grad()\nloss.backward()\noptimizer.step()",
            ),
        ),
    ),
    UsageEntry(
        cause=Cause.RANKS_NOT_REDUCED,
        correct="A model is wrapped when it has the parameters that it is trained with",
        sentence=without_effect(
            "DistributedDataParallel was built with other parameters than the model's {told.whose}, so backward does "
            "not reduce their gradients of {seen.ranks:,} ranks: each rank trains on its own data alone, and their "
            "weights part. The parameters were put there after the model was wrapped, as conversions, new layers and "
            "moves to another device do."
        ),
        remedies=(
            in_loop(
                text="Move, convert and complete the model first, and wrap it last.",
                code="model = model.to(device)\nmodel = DistributedDataParallel(model)",
            ),
        ),
        happens_once=True,
    ),
    UsageEntry(
        cause=Cause.AMP_WITHOUT_EFFECT,
        correct="Where mixed precision is asked for, ops run in half precision",
        sentence="Autocast or a GradScaler was asked for. No op runs in half precision.",
        remedies=(
            in_loop(
                text="Call the model inside a region for the device that it is on, or drop autocast and the scaler.",
                code="with torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16):\n"
                "    loss = loss_fn(model(x), y)",
            ),
        ),
        severity=Severity.WARNING,  # costs time and memory, and spoils nothing
        happens_once=True,
    ),
)
