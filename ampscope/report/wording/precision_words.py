"""A precision plan in words, and what traced steps ran in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampscope.analysis.precision.over_steps import DtypeChange, PrecisionOverSteps
from ampscope.analysis.precision.plan import Plan
from ampscope.analysis.precision.plan_modules import MX, NAMES, SCALED, FormatLoss, ModulePlan
from ampscope.analysis.scale.window import OptimizerPart
from ampscope.analysis.words import in_words, listed, op_in_words
from ampscope.report import numbers
from ampscope.report.numbers import count
from ampscope.report.safe_text import short

#: What a share is of, by the field that holds it, in the order in which they are told.
SHARES = {
    "overflow_share": "overflow",
    "lost_share": "flushed to zero",
    "subnormal_share": "subnormal",
    "gradient_overflow_share": "gradients: overflow",
    "gradient_lost_share": "gradients: flushed",
    "gradient_subnormal_share": "gradients: subnormal",
}
#: What formats are called where there is little room.
HEADS = {"float8_e4m3fn": "fp8 e4m3", "float8_e5m2": "fp8 e5m2", "mxfp8_e4m3": "mx e4m3", "mxfp8_e5m2": "mx e5m2"}
#: What is said of a run in which nothing was counted.
NOTHING_COUNTED = (
    "No step of this run has counted exponents, so nothing is known of what a narrower format would lose. "
    "Traced healthy steps count them (ampscope.watch(model, scaler, every=100)), and so do replays of bad ones."
)
#: The formats that are asked for most.
_ASKED = ("bfloat16", "float16", SCALED[0])
#: Modules that a sentence names, and characters of a name.
_NAMED, _LONGEST = 3, 60
#: From this much on, what no order of values exceeds is told beside what is to be expected.
_LEAST_APART = 0.001


def head(name: str) -> str:
    """A format's name."""
    return HEADS.get(name, name)


def module_words(module: str) -> str:
    """A module's name."""
    return short(module, _LONGEST) or "(the model itself)"


def answer(plan: Plan, name: str | None = None) -> str:
    """Whether the formats that are asked for most would do, or one of them, in one sentence."""
    asked = first, *others = _ASKED if name is None else (name,)
    measured = sum(any(each.formats[one].fits is not None for one in asked) for each in plan.modules)
    if not measured:
        weights, gradients = (any(getattr(each, of) for each in plan.modules) for of in ("tensors", "gradients"))
        alone = " and ".join(["weights"] * weights + ["gradients"] * gradients).capitalize()
        return f"{alone} alone were finite where they were measured, no module's values: nothing tells what would do."
    told = [f"{head(first)} would do for {_of(_fitting(plan, first), measured)}"]
    told += [f"{head(each)} for {_of_them(_fitting(plan, each), measured)}" for each in others]
    up = [module_words(each) for each in plan.stay_up[first]] if name is not None else []
    return f"By range alone, {', '.join(told)}{f'; {listed(up, _NAMED)} should stay above it' if up else ''}."


def basis(plan: Plan) -> str:
    """Says on which steps the plan rests."""
    live = sum(step.source.startswith("live") for step in plan.steps)
    parts = [numbers.count(live, "step") + " as it ran" * (live == 1) + " as they ran" * (live > 1)] if live else []
    replayed = len(plan.steps) - live
    parts += [numbers.count(replayed, "replayed step")] if replayed else []
    return f"By the exponents of {' and '.join(parts)}, up to step {max(step.step for step in plan.steps):,}."


def notes(plan: Plan, name: str | None = None) -> Iterator[str]:
    """Says what the shares of all formats, or of one, are shares of, and what they do not tell."""
    yield "Shares are of all values, and of the mass of gradients."
    yield "Only range is judged: what rounding to few bits does to a training, no histogram tells."
    shown = NAMES if name is None else (name,)
    if "float16" in shown and plan.gradient_scale is not None:
        yield f"float16 is judged at a loss scale of {in_words(plan.gradient_scale)}; {_window(*plan.scale_window)}."
        if plan.optimizers:
            yield several(plan.optimizers)
    if any(each in SCALED for each in shown) and plan.delayed_share is not None:
        share = numbers.share(plan.delayed_share)
        yield f"In fp8 each tensor is scaled by its largest value of steps before, where they were recorded ({share});"
        yield "what is larger becomes the largest number."
    if any(each in MX for each in shown):
        yield "What lies too far below the largest of its MX block, 32 elements beside each other in memory, is counted"
        counted = plan.counted_share or 0.0
        tensors = f" of {numbers.share(counted)} of the tensors; of others it is an estimate, for values in no order."
        yield "in sampled steps" + (tensors if counted < 1.0 else ".")
        yield "The largest of a block may overflow by design, and lose an eighth."


def several(optimizers: Sequence[OptimizerPart]) -> str:
    """The optimizers of a run that has several, and what each of them steps, in a sentence."""
    told = [
        f"optimizer {each.optimizer} steps {numbers.count(len(each.parameters), 'parameter')} of "
        f"{listed(list(map(module_words, each.modules)), _NAMED)}"
        for each in optimizers
    ]
    return f"The run has {len(optimizers)} optimizers: {', '.join(told)}."


def _window(low: float | None, high: float | None) -> str:
    over = "" if high is None else f"above {in_words(high)} one overflows"
    if low is None:
        return over or "at which ones gradients fit it is not known"
    kept = f"taken together, the gradients are kept from {in_words(low)}"
    if high is None:
        return f"{kept} on"
    return f"{kept} to {in_words(high)}" if low <= high else f"{kept} on, but {over}"


def by_format(plan: Plan, name: str) -> tuple[str, str, str]:
    """A format, and which modules may go that low and which should stay above it."""
    low = [module_words(each.module) for each in plan.modules if each.formats[name].fits]
    up = [module_words(each) for each in plan.stay_up[name]]
    may, stay = (f"{len(names):,}: {listed(names, _NAMED)}" if names else "none" for names in (low, up))
    return head(name), may, stay


def without_code(plan: Plan, name: str) -> str:
    """Says what to do for a format where there is nothing to paste."""
    up = [each or module_words("") for each in plan.stay_up.get(name, ())]
    if not up and all(each.formats[name].fits is None for each in plan.modules):
        return "No module's values were measured."
    return f"These should stay above it: {', '.join(up)}." if up else "Every module that was measured fits it."


def verdict(loss: FormatLoss) -> str:
    """Whether a module fits a format."""
    return {True: "fits", False: "stays up", None: "not measured"}[loss.fits]


def shares(loss: FormatLoss) -> list[str]:
    """All that a module would lose in a format, in the order of `SHARES`."""
    cells = [numbers.share(getattr(loss, field), narrow=True, missing=numbers.UNMEASURED) for field in SHARES]
    if loss.lost_at_most and loss.lost_share is not None and loss.lost_at_most > loss.lost_share + _LEAST_APART:
        cells[1] += f" (at most {numbers.share(loss.lost_at_most, narrow=True)})"
    return cells


def is_overflow_seen(module: ModulePlan, name: str) -> bool:
    """Whether a module does not fit because it overflowed as the run was."""
    return module.overflowed and name == "float16"


def _fitting(plan: Plan, name: str) -> int:
    return sum(each.formats[name].fits is True for each in plan.modules)


def _of(number: int, whole: int) -> str:
    if not number:
        return f"none ({numbers.count(whole, 'module')} measured)"
    if number < whole:
        return f"{number:,} of the {whole:,} modules that were measured"
    return f"all {whole:,} modules that were measured" if whole > 1 else "the one module that was measured"


def _of_them(number: int, whole: int) -> str:
    return "none" if not number else f"{number:,}" if number < whole else "all" if whole > 1 else "it too"


#: Changes that are told.
_TOLD = 3


def over_steps_in_words(seen: PrecisionOverSteps) -> Iterator[str]:
    """Says how the modules' dtypes changed from step to step."""
    steps = f"{count(len(seen.steps), 'traced step')}, {seen.steps[0]:,} to {seen.steps[-1]:,}"
    if not seen.changes:
        yield f"In all {steps}, every module ran in the same dtypes."
    for change in seen.changes[:_TOLD]:
        yield f"{change_words(change)}."
    if len(seen.changes) > _TOLD:
        more = count(len(seen.changes) - _TOLD, "more change")
        yield f"There {'is' if len(seen.changes) == _TOLD + 1 else 'are'} {more} in the {steps}."
    if seen.audited:
        verb = "was" if seen.audited == 1 else "were"
        yield f"{count(seen.audited, 'more step')} {verb} replayed for an audit alone and not counted."
    if seen.passed_over:
        yield f"{count(seen.passed_over, 'more traced step')} ran yet other ops and were not looked at."


def change_words(change: DtypeChange) -> str:
    """``h.2.mlp ran in float32 from step 40 on, before (up to step 39) in float16``."""
    named = listed([short(name, _LONGEST) or "code outside the modules" for name in change.modules], _NAMED, "module")
    what = f"{op_in_words(change.op)} in {named}" if change.op else named
    until = "on" if change.until is None else f"until step {change.until:,}"
    gap = f" (up to step {change.before:,})" if change.before < change.step - 1 else ""
    return f"{what} ran in {change.now} from step {change.step:,} {until}, before{gap} in {change.was}"
