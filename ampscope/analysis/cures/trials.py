"""What the counterfactual replays of an incident say: in words, and as remedies that were tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ampscope.analysis.causes.catalogue import CATALOGUE
from ampscope.analysis.causes.range.wider_dtype import USE_BFLOAT16
from ampscope.analysis.cures import explicit_half, other_forms, own_words
from ampscope.analysis.cures.explicit_half import ExplicitHalf
from ampscope.analysis.cures.keeping import keeping
from ampscope.analysis.results import CodeLine, Incident, Remedy, SourceLine, Tried
from ampscope.analysis.words.wording import op_in_words
from ampscope.trace.schema import LOSS_CODE, Change, Trial, Trigger
from ampscope.trace.vocabulary import Cause


def by_precision(cause: Cause, tried: Sequence[Tried]) -> bool:
    """Whether a failure is one of precision: by its cause, unless float32 was tried in vain, or by that trial."""
    cured, by_nature = fp32_ok(tried), CATALOGUE[cause].cured_by_precision
    return bool(by_nature) if cured is None else cured and by_nature is not False


def fp32_ok(tried: Sequence[Tried]) -> bool | None:
    """Whether the step is finite in float32, each time; None where that was not tried or could not be run."""
    failed, cured = _of(tried, Change.FP32, Trial.NONFINITE), _of(tried, Change.FP32, Trial.FINITE)
    return not failed if failed or cured else None


def in_words(incident: Incident) -> str:
    """One sentence on what was tried on an incident and what came out; empty where nothing was."""
    tried, op = incident.tried, op_in_words(incident.op)
    if incident.trigger == Trigger.LOST_GRADIENT:
        return _kept_in_words(tried)
    if incident.trigger == Trigger.ABSORBED_OVERFLOW:
        return _agreed_in_words(tried)
    fails = list(dict.fromkeys(_did(each, tried) for each in tried if each.outcome == Trial.NONFINITE))
    values = {_did(each, tried): _value(each, op) for each in reversed(tried) if each.outcome == Trial.FINITE}
    later = {_did(each, tried): each.followed for each in sorted(tried, key=lambda each: each.followed)}
    told = reversed(values.items())
    cures = [f"{change}{value}{_later(later[change])}" for change, value in told if change not in fails]
    parts = [*(f"finite {cure}" for cure in cures), *(f"still not finite {fail}" for fail in fails)]
    doubts = dict.fromkeys(each.reason for each in tried if each.change == Change.NONE and each.reason)
    return " ".join([f"Run again, the step is {', '.join(parts)}." if parts else "", *map(_sentence, doubts)]).strip()


def _kept_in_words(tried: Sequence[Tried]) -> str:
    """The same of a step that was finite all along, and lost gradients."""
    loses = list(dict.fromkeys(_changed(each) for each in tried if each.outcome == Trial.NONFINITE))
    found = dict.fromkeys(_changed(each) for each in tried if each.outcome == Trial.FINITE)
    keeps = [change for change in found if change not in loses]
    told = {"keeps its gradients": keeps, "still loses them" if keeps else "still loses its gradients": loses}
    parts = [f"{what} {', '.join(changes)}" for what, changes in told.items() if changes]
    return f"Run again, the step {', and '.join(parts)}." if parts else ""


def _agreed_in_words(tried: Sequence[Tried]) -> str:
    """The same of a step that was finite all along, in which an overflow was hidden; of float32 the incident tells."""
    told: dict[str, str] = {Trial.FINITE: "agrees with float32", Trial.NONFINITE: "does not agree with float32"}
    outcomes = {_changed(each): told.get(each.outcome) for each in tried if each.change != Change.FP32}
    parts = [f"{change} {what}" for change, what in outcomes.items() if what]
    return f"Run again, the step {', and '.join(parts)}." if parts else ""


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _later(steps: int) -> str:
    return f" (on {steps} later step{'s' * (steps > 1)} too)" if steps else ""


def _did(each: Tried, tried: Sequence[Tried]) -> str:
    """All that a replay did otherwise, in words."""
    return f"{_changed(each)}{other_forms.with_scale(each, tried)}"


def _changed(tried: Tried) -> str:
    if tried.change == Change.SCALE:
        return f"with a loss scale of {tried.scale:g}"
    if tried.form is not None:
        return f"with {other_forms.in_words(tried.form)}"
    if tried.change == Change.MODULES_FP32:
        too = " and where the code itself converts to half precision" if tried.conversions else ""
        return f"with {modules_in_words(tried.modules)} in float32{too}"
    return next((words for change, words in _IN_WORDS.items() if change == tried.change), "unchanged")


_IN_WORDS = {
    Change.FP32: "in float32",
    Change.BF16: "in bfloat16",
    Change.CONVERSIONS: "with float32 where the code itself converts to half precision",
}


def _value(tried: Tried, op: str) -> str:
    """The value that the op at the origin gives in float32, beside the one that went wrong."""
    ends = [abs(end) for end in (tried.op_min, tried.op_max) if end is not None]
    if tried.change != Change.FP32 or not ends or not op:
        return ""
    return f" (where {op} gives magnitudes up to {max(ends):.4g})"


def modules_in_words(modules: Sequence[str]) -> str:
    """``attn and the loss code``."""
    names = {LOSS_CODE: "the loss code", "": "the model itself"}
    return _listed([names.get(name, name) for name in modules])


def _listed(parts: Sequence[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else "".join(parts)


_NOTHING = ExplicitHalf()
#: Causes that a larger loss scale may cure.
_OF_SMALL_VALUES = (Cause.FP16_UNDERFLOW, Cause.STAGNATION)

# -- remedies ---------------------------------------------------------------------------------------------------------


def remedies(
    cause: Cause, tried: Sequence[Tried], explicit: ExplicitHalf = _NOTHING, watched_at: SourceLine | None = None
) -> tuple[Remedy, ...]:
    """What was tried, as advice: what cured the step first, and of that what changes least; then what did not help.

    Each remedy says all that its replay did otherwise: what the code asks for by itself is out of autocast's reach.

    Args:
        cause: The cause.
        tried: The replays.
        explicit: The half precision that the code asks for itself.
        watched_at: The line that calls ``watch``, where what keeps modules in float32 belongs.
    """
    forms = tuple(sorted(other_forms.remedies(tried), key=lambda remedy: bool(remedy.changes_good_values)))
    if CATALOGUE[cause].cured_by_precision is False:
        return forms
    scales = _larger_scale(tried) if cause in _OF_SMALL_VALUES else _scale(tried)
    advice = [
        *forms,
        *_of_kind(Change.MODULES_FP32, _modules(tried, explicit, watched_at), _fewest(tried)),
        *_wider(tried),
        *_of_kind(Change.CONVERSIONS, _conversions(tried), tried),
        *_of_kind(Change.SCALE, scales, ()),
        *_of_kind(Change.BF16, _bf16(tried, explicit), tried),
        *_of_kind(Change.FP32, _fp32(tried, explicit), tried),
    ]
    return tuple(sorted(advice, key=lambda remedy: not remedy.verified))


def _of_kind(change: Change, advice: Iterator[Remedy], tried: Sequence[Tried]) -> Iterator[Remedy]:
    """Remedies of one change; what cured, with what it costs."""
    found = [each for each in tried if each.change == change]
    for remedy in advice:
        yield replace(remedy, kind=change, cost=other_forms.cost(found) if remedy.verified else None)


def _of(tried: Sequence[Tried], change: Change, outcome: Trial) -> list[Tried]:
    """The replays with a change that came out so; what cured one step and not another has not cured."""
    failed = [_changed(each) for each in tried if each.outcome == Trial.NONFINITE]
    found = [each for each in tried if each.change == change and each.outcome == outcome]
    return [each for each in found if outcome != Trial.FINITE or _changed(each) not in failed]


def _conversions(tried: Sequence[Tried]) -> Iterator[Remedy]:
    for outcome, verified in ((Trial.FINITE, True), (Trial.NONFINITE, False)):
        for each in _of(tried, Change.CONVERSIONS, outcome)[:1]:
            yield take_out(each.conversions or (), verified=verified)


def take_out(lines: Sequence[CodeLine], *, verified: bool | None = None) -> Remedy:
    """The advice not to convert to half precision by hand."""
    also = " and change nothing else" if verified is False else ", or convert to float32 there"
    return Remedy(
        text=f"Take out {explicit_half.places(lines)}{also}.",
        code=explicit_half.rewritten(lines, "float32"),
        diff=own_words.of_conversions(lines, "float32") if verified is not False else None,
        verified=verified,
    )


def _with_explicit(remedy: Remedy, dtype: str, lines: Sequence[CodeLine], half_values: Sequence[str]) -> Remedy:
    """A remedy together with what else its replay had in another dtype: conversions, and what was half from outside."""
    text, code = remedy.text, remedy.code
    if lines:
        text = f"Take out {explicit_half.places(lines)} (or convert to {dtype}), and {text[:1].lower()}{text[1:]}"
        code = "\n".join(filter(None, (code, explicit_half.rewritten(lines, dtype))))
    if half_values:
        text += f" What is half precision by itself has to be {dtype} too: {explicit_half.listed(half_values)}."
    return replace(remedy, text=text, code=code)


def _modules(tried: Sequence[Tried], explicit: ExplicitHalf, watched_at: SourceLine | None) -> Iterator[Remedy]:
    cured = _locally(tried)
    fewest = min(cured, key=lambda each: len(each.modules), default=None)
    if fewest is not None:
        half = [name for name in explicit.weights.parameters if _is_inside(name, fewest.modules)]
        keep = Remedy(
            text=f"Keep {modules_in_words(fewest.modules)} in float32.",
            code=keeping(fewest.modules, half),
            verified=True,
        )
        lines = _converted(fewest, explicit) if fewest.conversions or LOSS_CODE in fewest.modules else ()
        whole = not lines and not half  # what else the replay changed would be missing
        keep = replace(keep, diff=own_words.of_kept(fewest.modules, watched_at) if whole else None)
        yield _with_explicit(keep, "float32", lines, half)
    for each in _of(tried, Change.MODULES_FP32, Trial.NONFINITE)[:1]:
        alone = " alone" if len(each.modules) == 1 else ""
        keep = Remedy(text=f"Keep {modules_in_words(each.modules)}{alone} in float32.", verified=False)
        yield _with_explicit(keep, "float32", each.conversions or (), ())


def _converted(tried: Tried, explicit: ExplicitHalf) -> tuple[CodeLine, ...]:
    """The conversions that a replay replaced; where that was not recorded, the one that the failure stems from."""
    return explicit.conversions if tried.conversions is None else tried.conversions


def _is_inside(name: str, modules: Sequence[str]) -> bool:
    return any(not module or name.startswith(f"{module}.") for module in modules)


def _locally(tried: Sequence[Tried]) -> list[Tried]:
    """What cured the step with some modules in float32, and not the whole model."""
    return [each for each in _of(tried, Change.MODULES_FP32, Trial.FINITE) if "" not in each.modules]


def _fewest(tried: Sequence[Tried]) -> list[Tried]:
    """The replays with the fewest modules that cured."""
    cured = _locally(tried)
    fewest = min(cured, key=lambda each: len(each.modules), default=None)
    return [each for each in cured if fewest is not None and each.modules == fewest.modules]


def _wider(tried: Sequence[Tried]) -> Iterator[Remedy]:
    """More modules than the cure needs, where another is next to overflow; the replay says which."""
    wider = {each.modules: each for each in _locally(tried) if each.reason}
    for modules, each in wider.items():
        yield Remedy(
            text=f"Keep {modules_in_words(modules)} in float32: {each.reason}.",
            code=keeping(modules, ()),
            verified=True,
            kind=Change.MODULES_FP32,
            cost=other_forms.cost([each for each in tried if each.modules == modules]),
        )


def _larger_scale(tried: Sequence[Tried]) -> Iterator[Remedy]:
    """The loss scale for gradients that are too small."""
    for each in _of(tried, Change.SCALE, Trial.FINITE)[:1]:
        yield Remedy(
            text=f"Start with a larger loss scale: at {each.scale:g} the gradients of this step are whole.",
            code=f"scaler = torch.amp.GradScaler(init_scale={each.scale!r})",
            verified=True,
        )
    for each in _of(tried, Change.SCALE, Trial.NONFINITE)[:1]:
        yield Remedy(text=f"A larger loss scale: one of {each.scale:g} does not help.", verified=False)


def _scale(tried: Sequence[Tried]) -> Iterator[Remedy]:
    fits = max((each.scale or 0.0 for each in _of(tried, Change.SCALE, Trial.FINITE)), default=0.0)
    if fits > 1:
        yield Remedy(
            text=f"Start with a loss scale that fits: the gradients of this step are finite at {fits:g}.",
            code=f"scaler = torch.amp.GradScaler(init_scale={fits!r})",
            verified=True,
        )
    elif not fits and _of(tried, Change.SCALE, Trial.NONFINITE):
        yield Remedy(text="Lower the loss scale: even a scale of 1 does not help.", verified=False)


def _bf16(tried: Sequence[Tried], explicit: ExplicitHalf) -> Iterator[Remedy]:
    for outcome, verified in ((Trial.FINITE, True), (Trial.NONFINITE, False)):
        for each in _of(tried, Change.BF16, outcome)[:1]:
            yield _with_explicit(
                replace(USE_BFLOAT16, verified=verified), "bfloat16", _converted(each, explicit), explicit.half_values
            )


def _fp32(tried: Sequence[Tried], explicit: ExplicitHalf) -> Iterator[Remedy]:
    """Float32 for everything: the last of what helps, because it gives up what mixed precision is for."""
    whole = [each for each in _of(tried, Change.MODULES_FP32, Trial.FINITE) if "" in each.modules]
    cured = [*whole, *_of(tried, Change.FP32, Trial.FINITE)]
    if _of(tried, Change.FP32, Trial.NONFINITE):
        yield Remedy(text="More precision: float32 everywhere.", verified=False)
    elif cured and not _locally(tried) and not _of(tried, Change.CONVERSIONS, Trial.FINITE):
        lines, half_values = _converted(cured[-1], explicit), explicit.half_values
        part = "" if whole or lines or half_values else ", or switch it off around the part that fails"
        weights = "model.float()\n" if explicit.weights.parameters or explicit.weights.buffers else ""
        without = Remedy(
            text=f"Compute in float32: leave autocast out{part}.",
            code=f"{weights}with torch.autocast(device_type, enabled=False):\n    loss = loss_fn(model(x.float()), y)",
            verified=True,
        )
        yield _with_explicit(without, "float32", lines, half_values)
