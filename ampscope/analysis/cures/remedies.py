"""Which change cures which cause, with code to paste."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ampscope.analysis.cures import trials
from ampscope.analysis.cures.own_half import OwnHalf
from ampscope.analysis.numerics import rounding
from ampscope.analysis.results import Remedy, Tried
from ampscope.analysis.words.wording import short_op
from ampscope.trace.schema import Change
from ampscope.trace.vocabulary import Cause

Facts = dict[str, Any]


class Patient(NamedTuple):
    """What is to be cured."""

    op: str
    module: str
    facts: Facts
    tried: tuple[Tried, ...] = ()

    @property
    def own(self) -> OwnHalf:
        """The half precision that the code asks for itself."""
        own = self.facts.get("own")
        return own if isinstance(own, OwnHalf) else OwnHalf()

    def has_tried(self, change: Change) -> bool:
        """Whether a replay has tried a change: what it says is better than general advice."""
        return any(each.change == change for each in self.tried)


def remedies(
    cause: Cause, *, op: str = "", module: str = "", facts: Facts | None = None, tried: Sequence[Tried] = ()
) -> tuple[Remedy, ...]:
    """The cures for ``cause``: those that a replay proved, then the others, then what was tried in vain."""
    patient = Patient(op, module, facts or {}, tuple(tried))
    advice = _FITTED[cause](patient) if cause in _FITTED else _GENERAL.get(cause, ())
    if patient.own.conversions and not patient.has_tried(Change.CONVERSIONS):
        advice = (trials.take_out(patient.own.conversions), *advice)
    proved = trials.remedies(cause, tried, patient.own)
    told = {remedy.text for remedy in proved}
    helped = [remedy for remedy in proved if remedy.verified]
    untried = [remedy for remedy in advice if remedy.text not in told]
    return (*helped, *untried, *(remedy for remedy in proved if not remedy.verified))


def _fp32_region(module: str) -> Remedy:
    where = f"module {module}" if module else "this part of the loss"
    return Remedy(
        text=f"Run {where} in float32.",
        code=(
            "with torch.autocast(x.device.type, enabled=False):\n"
            "    y = part(x.float())  # the part that overflows, on float32 operands"
        ),
    )


#: Products of two tensors of the same rank, as of queries and keys; those with a bias or a vector are none.
_PRODUCTS = frozenset({"mm", "bmm", "matmul", "baddbmm"})


def _fp16_overflow(patient: Patient) -> tuple[Remedy, ...]:
    found = []
    if short_op(patient.op) in _PRODUCTS:
        found.append(
            Remedy(
                text="If this is a product of queries and keys, scale one side before the product, not after it.",
                code="logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)",
            )
        )
    if any(word in patient.op for word in ("pow", "square", "norm", "mul")):
        found.append(
            Remedy(text="Square and average in float32, then return to the old dtype.", code="h = x.float().pow(2)")
        )
    if any(word in patient.op for word in ("sum", "cumsum", "mean")):
        found.append(Remedy(text="Accumulate in float32.", code="total = x.sum(dtype=torch.float32)"))
    return (*found, *_more_range(patient))


def _more_range(patient: Patient) -> tuple[Remedy, ...]:
    """Float32 for the part that needs it, or bfloat16: as long as neither was tried, and where autocast decides."""
    if patient.own.is_cause:
        return ()
    region = () if patient.has_tried(Change.MODULES_FP32) else (_fp32_region(patient.module),)
    return region if patient.has_tried(Change.BF16) else (*region, trials.bf16())


def _eps(patient: Patient) -> tuple[Remedy, ...]:
    dtype = str(patient.facts.get("dtype", "float16"))
    if patient.facts.get("becomes") == 1.0:
        bound = 1 - rounding.EPSILON.get(dtype, 1e-3)
        first = Remedy(
            text=f"Use a bound that {dtype} can tell from 1.",
            code=f"p = p.clamp(max={bound!r})",
        )
    else:
        eps = rounding.safe_eps(dtype)
        first = Remedy(text=f"Use an eps that survives {dtype}: at least {eps:.3g}.", code=f"eps = {eps:.3g}")
    if patient.own.is_cause or patient.has_tried(Change.MODULES_FP32):
        return (first,)
    return first, _fp32_region(patient.module)


def _literal(patient: Patient) -> tuple[Remedy, ...]:
    dtype = patient.facts.get("dtype", "float16")
    return (
        Remedy(
            text=f"Use the lowest value of the dtype in use; {patient.facts.get('literal')} does not fit {dtype}.",
            code="mask_value = torch.finfo(x.dtype).min",
        ),
    )


def _scale_overflow(patient: Patient) -> tuple[Remedy, ...]:
    smaller = Remedy(
        text="Bring the loss to an ordinary size (a mean instead of a sum, smaller weights): its gradient "
        "overflows float16 at every loss scale that was tried.",
        code="loss = loss / loss_weight",
    )
    lower = Remedy(
        text="Or start lower, so that fewer steps are lost.",
        code="scaler = torch.amp.GradScaler(init_scale=2.0**8)",
    )
    return (smaller, trials.bf16()) if patient.has_tried(Change.SCALE) else (smaller, lower, trials.bf16())


def _underflow(patient: Patient) -> tuple[Remedy, ...]:
    if "parameter" not in patient.facts:  # a value that a division or logarithm needs was flushed
        keep = Remedy(
            text="Compute the small value and what needs it in float32, where it does not become zero.",
            code="p = x.float().softmax(-1)  # before the product, the exponential or the division that shrinks it",
        )
        return keep, *_more_range(patient)
    scale = Remedy(
        text="Scale the loss, or raise the scale that it has: gradients this small need the room that a loss scale "
        "makes.",
        code="scaler = torch.amp.GradScaler(init_scale=2.0**16)\nscaler.scale(loss).backward()",
    )
    factor = Remedy(text="Leave out the small factor in the loss, and lower the learning rate in its place.")
    return scale, factor, *_more_range(patient)


_FITTED: dict[Cause, Callable[[Patient], tuple[Remedy, ...]]] = {
    Cause.FP16_OVERFLOW: _fp16_overflow,
    Cause.EPS_UNDERFLOW: _eps,
    Cause.LITERAL_OVERFLOW: _literal,
    Cause.SCALE_OVERFLOW: _scale_overflow,
    Cause.FP16_UNDERFLOW: _underflow,
}

_FROM_LOGITS: tuple[Remedy, ...] = (
    Remedy(
        text="Compute the logarithm from the logits, in one step that cannot reach log(0).",
        code="loss = F.cross_entropy(logits, target)  # or F.log_softmax, F.binary_cross_entropy_with_logits",
    ),
    Remedy(
        text="Or keep the operand away from zero with a bound that survives the dtype.",
        code="loss = -torch.log(p.float().clamp_min(1e-7))",
    ),
)

_CLEAN_STATE: tuple[Remedy, ...] = (
    Remedy(
        text="Load a checkpoint from before it went bad, and keep non-finite values out of it.",
        code="if value.isfinite().all():\n    self.buffer.copy_(value)",
    ),
)

_ONCE_A_STEP: tuple[Remedy, ...] = (
    Remedy(
        text="Unscale, step and update once per optimizer step, after the last micro-batch.",
        code="if (i + 1) % accumulation == 0:\n    scaler.unscale_(optimizer)\n"
        "    scaler.step(optimizer)\n    scaler.update()",
    ),
)

_GENERAL: dict[Cause, tuple[Remedy, ...]] = {
    Cause.LOG_ZERO: _FROM_LOGITS,
    Cause.DIV_ZERO: (
        Remedy(text="Bound the divisor away from zero before dividing.", code="y = a / b.clamp_min(1e-6)"),
        Remedy(text="Leave out what is empty (a mask without a single element, a batch of one) before the mean."),
    ),
    Cause.SQRT_NEGATIVE: (
        Remedy(
            text="Bound the operand at zero; a difference of squares can round below it.",
            code="y = x.clamp_min(0).add(1e-6).sqrt()",
        ),
    ),
    Cause.SQRT_GRAD_ZERO: (
        Remedy(text="Put a small constant inside the square root.", code="d = (x.square().sum(-1) + 1e-6).sqrt()"),
    ),
    Cause.POW_GRAD_ZERO: (
        Remedy(
            text="Keep the base away from zero: the slope of x**p is infinite there for p < 1.",
            code="y = x.clamp_min(1e-4).pow(p)",
        ),
    ),
    Cause.WHERE_GRAD_TRAP: (
        Remedy(
            text="Make the operand safe before the op, not its result after it: torch.where masks the value, but the "
            "gradient still passes through the op and multiplies 0 by an infinity.",
            code="safe = torch.where(ok, x, torch.ones_like(x))\ny = torch.where(ok, op(safe), 0.0)",
        ),
    ),
    Cause.ALL_MASKED_SOFTMAX: (
        Remedy(
            text="Keep at least one key in every row, or zero the rows that have none.",
            code="empty = mask.all(-1, keepdim=True)\nw = logits.masked_fill(mask & ~empty, -torch.inf).softmax(-1)",
        ),
    ),
    Cause.CTC_INFEASIBLE: (
        Remedy(
            text="The target is longer than its input allows: filter such pairs, or set their loss to zero.",
            code="torch.nn.CTCLoss(zero_infinity=True)",
        ),
    ),
    Cause.DIVERGENCE: (
        Remedy(text="Lower the learning rate, or warm it up; the run leaves every dtype's range."),
        Remedy(
            text="Clip the gradient's norm, after unscaling.",
            code="scaler.unscale_(optimizer)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        ),
    ),
    Cause.BAD_INPUT: (
        Remedy(
            text="Find and clean the samples before they reach the model.",
            code="assert x.isfinite().all(), 'non-finite batch'",
        ),
    ),
    Cause.BAD_WEIGHT: _CLEAN_STATE,
    Cause.BAD_BUFFER: _CLEAN_STATE,
    Cause.BF16_PRECISION: (
        Remedy(
            text="Keep the parameters in float32 and let autocast choose bfloat16 op by op; small updates "
            "then reach weights that can hold them.",
            code="model.float()\nwith torch.autocast(device_type, dtype=torch.bfloat16):\n    loss = step(batch)",
        ),
        Remedy(text="Or give the optimizer float32 master weights, or one that rounds stochastically."),
    ),
    Cause.HALF_PARAMS: (
        Remedy(
            text="Keep the parameters in float32 and let autocast choose the precision of each op.",
            code="model.float()\nwith torch.autocast(device_type, dtype=torch.float16):\n    loss = step(batch)",
        ),
    ),
    Cause.HARDWARE_TRANSIENT: (
        Remedy(
            text="The same calls on the same values are finite when run again: suspect the device, its memory "
            "or driver, or code that writes into tensors behind torch's back."
        ),
    ),
    Cause.MISUSE_CLIP_BEFORE_UNSCALE: (
        Remedy(
            text="Unscale before clipping.",
            code="scaler.unscale_(optimizer)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
        ),
    ),
    Cause.MISUSE_NO_UNSCALE: (
        Remedy(text="Step through the scaler, which unscales first.", code="scaler.step(optimizer)\nscaler.update()"),
    ),
    Cause.MISUSE_UPDATE_EACH_MICROBATCH: _ONCE_A_STEP,
    Cause.MISUSE_MULTIPLE_SCALERS_UPDATE: _ONCE_A_STEP,
    Cause.MISUSE_BACKWARD_UNDER_AUTOCAST: (
        Remedy(
            text="End the autocast block before backward.",
            code="with torch.autocast(device_type, dtype=torch.float16):\n    loss = loss_fn(model(x), y)\n"
            "scaler.scale(loss).backward()",
        ),
    ),
    Cause.MISUSE_AUTOCAST_SPANS_STEP: (
        Remedy(
            text="Open the autocast block anew for each forward, and leave it before backward.",
            code="for x, y in loader:\n    with torch.autocast(device_type, dtype=torch.float16):\n"
            "        loss = loss_fn(model(x), y)",
        ),
    ),
    Cause.MISUSE_CHECKPOINT_AUTOCAST_MISMATCH: (
        Remedy(
            text="Use torch's checkpoint, which restores the autocast state, or restore it in your own.",
            code="from torch.utils.checkpoint import checkpoint\ny = checkpoint(block, x, use_reentrant=False)",
        ),
    ),
    Cause.MISUSE_MISSING_SCALER: (
        Remedy(
            text="Scale the loss: small float16 gradients become zero otherwise.",
            code="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
        ),
        trials.bf16(),
    ),
    Cause.MISUSE_SCHEDULER_ORDER: (
        Remedy(
            text="Step the scheduler only when the optimizer stepped: the scale drops when it did not.",
            code="before = scaler.get_scale()\nscaler.step(optimizer)\nscaler.update()\n"
            "if scaler.get_scale() >= before:\n    scheduler.step()",
        ),
    ),
    Cause.MISUSE_SCALER_STATE_NOT_RESTORED: (
        Remedy(
            text="Save and load the scaler with the model and the optimizer.",
            code='checkpoint["scaler"] = scaler.state_dict()\n...\nscaler.load_state_dict(checkpoint["scaler"])',
        ),
    ),
}
