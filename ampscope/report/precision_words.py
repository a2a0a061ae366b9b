"""Precision plans, ranges of values and loss scales are put into words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampscope.analysis.precision.over_steps import DtypeChange, PrecisionOverSteps
from ampscope.analysis.precision.plan import Plan
from ampscope.analysis.precision.plan_modules import MX, NAMES, SCALED, FormatLoss, ModulePlan
from ampscope.analysis.precision.ranges.measured import NEAR_BITS
from ampscope.analysis.precision.ranges.ranges import RangeRow, Ranges
from ampscope.analysis.scale.what_if import ScalerRules, WhatIf
from ampscope.analysis.scale.window import OptimizerPart, ScaleWindow
from ampscope.analysis.words import capitalized, in_words, listed, op_in_words, place_in_words
from ampscope.report import numbers
from ampscope.report.numbers import count
from ampscope.report.safe_text import short
from ampscope.trace.dtypes import FINFO, HALF_DTYPES
from ampscope.trace.schema import Node, Phase

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


#: Growth that is told, in bits a step: less is none.
LEAST_GROWTH = 5e-5


def sampled_sentence(found: Ranges) -> str:
    """How many of the steps all that is told of a rank rests on."""
    share = numbers.share(found.sampled_share)
    replayed = f", {found.replayed_steps:,} more in a replay" if found.replayed_steps else ""
    steps = f"{found.sampled_steps:,} of {numbers.count(found.steps, 'step')} ({share})"
    return f"{steps} were recorded op by op as they ran{replayed}."


def closest_sentence(found: Ranges) -> str:
    """Says which value came closest to overflow, how close, when, and where it is going."""
    row = next(
        (row for row in found.rows if row.headroom_bits is not None and not (row.fixed and not row.overflowed)), None
    )
    if row is None:
        return "No value that can grow was measured in this run."
    if row.overflowed:
        return f"{capitalized(place_words(row))} {overflows(row)} in {row.dtype}."
    where = f"{place_words(row)}, {distance(row)}{_when(row)}"
    if row.scale is not None:
        return f"Only gradients were measured, with their loss scale. The closest to overflow: {where}."
    going = _going(row)
    if row.headroom_bits is not None and row.headroom_bits >= NEAR_BITS and row.forecast_step is None:
        nothing = "Gradients with a loss scale aside, nothing" if found.scaled else "Nothing"
        return f"{nothing} is near overflow. The closest value: {where}{going}. {gradients_sentence(found)}".rstrip()
    return f"The closest value to overflow: {where}{going}. {gradients_sentence(found)}".rstrip()


def gradients_sentence(found: Ranges) -> str:
    """Says which value overflowed because of the loss scale; empty where none did."""
    row = found.scaled_overflow
    if row is None:
        return ""
    backward = " in backward" if row.phase == Phase.BACKWARD else ""
    return f"With the loss scale, {place_words(row)}{backward} {overflows(row)}."


def place_words(row: RangeRow) -> str:
    """``gelu in h.3.mlp``, ``the gradient of fc.weight``."""
    what = "the scaled loss" if row.op == Node.LOSS and row.scale is not None else place_in_words(row.op, row.name)
    return f"{what} in {row.module}" if row.module and f"{row.module}." not in row.name else what


def flushed(row: RangeRow) -> str:
    """The share of zeros that float32 would not have had; empty of what is not in half precision."""
    if row.flushed_share is None and row.dtype not in HALF_DTYPES:
        return ""
    return numbers.share(row.flushed_share, narrow=True, missing="not known")


def distance(row: RangeRow) -> str:
    """``4.2 bits below float16's 65,504``."""
    return f"{bits(row.headroom_bits)} bits below {row.dtype}'s {numbers.value(FINFO[row.dtype].max)}"


def bits(number: float | None) -> str:
    """Powers of two with one digit."""
    return "" if number is None else f"{number:.1f}"


def growth(row: RangeRow) -> str:
    """Bits in a hundred steps, with a sign."""
    rate = row.bits_per_step
    if rate is None:
        return ""
    return numbers.signed(100 * rate, 3) if abs(rate) >= LEAST_GROWTH else "0"


def forecast(row: RangeRow) -> str:
    """When it overflows, or how often it did."""
    if row.overflowed:
        return overflows(row)
    if row.forecast_step is None or row.forecast_low is None or row.forecast_high is None:
        return ""
    return f"step {row.forecast_step:,} ({row.forecast_low:,} to {row.forecast_high:,})"


def overflows(row: RangeRow) -> str:
    """``overflowed 3 times``; ``at least`` where older steps were not looked at."""
    return f"overflowed {'at least ' if row.overflowed_at_least else ''}{numbers.count(row.overflowed, 'time')}"


def line(row: RangeRow) -> str:
    """Returns the user's line as ``model.py:34``; empty where none is known."""
    return f"{row.source.file.rpartition('/')[2]}:{row.source.line}" if row.source else ""


def _when(row: RangeRow) -> str:
    if row.largest_step is None or row.largest_last is None:
        return ""
    if row.largest_step == row.largest_last:
        return f", at step {row.largest_step:,}"
    return f", between steps {row.largest_step:,} and {row.largest_last:,}"


def _going(row: RangeRow) -> str:
    if row.forecast_step is None or row.forecast_low is None or row.forecast_high is None or row.bits_per_step is None:
        return ""
    return (
        f"; it grows {row.bits_per_step:.2g} bits a step and would get there near step {row.forecast_step:,} "
        f"({row.forecast_low:,} to {row.forecast_high:,})"
    )


def sentences(window: ScaleWindow) -> Iterator[str]:
    """The scales at which all gradients together fit, and what that was counted in."""
    if window.optimizers:
        of = f" This is of optimizer {window.optimizer}." if window.optimizer is not None else ""
        yield f"{several(window.optimizers)}{of}"
    if window.low is None and window.high is None:
        yield f"Not known: {_unknown(window)}"
        return
    yield _ends(window)
    yield _basis(window) if window.at_scale else _unknown(window)


def _ends(window: ScaleWindow) -> str:
    least = "at least " if not window.exact else ""
    low = "not known" if window.low is None else f"{least}{in_words(window.low)}"
    high = "not known" if window.high is None else f"{in_words(window.high)}, above which {window.limited_by} overflows"
    return f"Smallest that saves the gradients, taken together: {low}. Largest that does not overflow: {high}."


def _unknown(window: ScaleWindow) -> str:
    what = "no traced step has counted the exponents of gradients, so nothing is known of what is flushed to zero. "
    return f"{capitalized(what) if window.high is not None else what}Traced healthy steps count them: every=N."


def _basis(window: ScaleWindow) -> str:
    steps = numbers.count(len(window.steps), "step")
    sentences = [f"Counted in {steps}, up to step {window.steps[-1]:,}."]
    if window.zero_share:
        zeros = numbers.share(window.zero_share)
        sentences.append(
            f"{zeros} of the values were exactly zero: truly so or flushed, which the trace does not tell."
        )
    if window.unmeasured:
        sentences.append(f"Not measured: the gradients of {numbers.count(window.unmeasured, 'parameter')}.")
    return " ".join(sentences)


def in_sentences(answer: WhatIf) -> list[str]:
    """The answer in words, and how sure it is."""
    skipped, was = (numbers.count(number, "step") for number in (answer.skipped, answer.was_skipped))
    same = answer.skipped == answer.was_skipped
    sentences = [
        f"{skipped} would have been skipped"
        + (", as many as were." if same else f"; {was} {'was' if answer.was_skipped == 1 else 'were'}.")
    ]
    if answer.unsaved:
        sentences.append(f"{answer.unsaved:,} of them had a loss that no scale would have saved.")
    if answer.lowest is not None and answer.current is not None:
        sentences.append(
            f"The scale would be {in_words(answer.current)} now, and {in_words(answer.lowest)} at its lowest."
        )
    if answer.proven < answer.steps:
        guessed = numbers.count(answer.steps - answer.proven, "step")
        sentences.append(f"For {guessed} this is an estimate from the steps around; of the others the run proves it.")
    return sentences


def code(rules: ScalerRules) -> str:
    """The scaler to paste."""
    lines = [
        "scaler = torch.amp.GradScaler(",
        f"    init_scale={_exact(rules.init_scale)},",
        f"    growth_factor={_exact(rules.growth_factor)},",
        f"    backoff_factor={_exact(rules.backoff_factor)},",
        f"    growth_interval={rules.growth_interval},",
        ")",
    ]
    if rules.floor:
        lines.append(
            f"# after scaler.update():\nif scaler.get_scale() < {rules.floor:g}:\n    scaler.update({rules.floor:g})"
        )
    return "\n".join(lines)


def _exact(number: float) -> str:
    """Short where that loses nothing: ``65536``, but ``16777216.0``."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)
