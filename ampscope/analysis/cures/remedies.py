"""The cures for a cause: what replays have tried, in words, as code and as a diff, and what is advised besides."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ampscope.analysis.causes import cause_entry
from ampscope.analysis.causes.catalogue import CATALOGUE
from ampscope.analysis.causes.cause_entry import NOTHING_MORE, USE_BFLOAT16, Occurrence, Reason
from ampscope.analysis.causes.overflow import ScaleInLoop
from ampscope.analysis.cures import explicit_half, other_forms, own_words
from ampscope.analysis.cures.explicit_half import ExplicitHalf
from ampscope.analysis.cures.own_words import Program
from ampscope.analysis.cures.trials import came_out, modules_in_words
from ampscope.analysis.results import CodeLine, Incident, Remedy, Tried
from ampscope.analysis.words import in_words, listed
from ampscope.cures.catalogue import cure_form
from ampscope.cures.rewriting.edit import joined
from ampscope.trace.schema import LOSS_CODE, Change, ReplayStatus, Trial, Trigger
from ampscope.trace.vocabulary import Cause

_ENDED = "another form has cured the step before its turn came"


def beside(advice: Sequence[Remedy], proved: Sequence[Remedy]) -> Iterator[Remedy]:
    """Yields the advice for a cause that no replay has tried.

    Args:
        advice: All of it.
        proved: What replays have tried.
    """
    kinds = {kind for remedy in proved for kind in (remedy.kind, *cure_form(remedy.kind).speaks_for)} - {""}
    known = {remedy.text for remedy in proved}
    cured = max((cure_form(each.kind).turn for each in proved if each.verified), default=-1)
    for remedy in advice:
        if remedy.text in known or remedy.kind in kinds:
            continue
        if not 0 <= cure_form(remedy.kind).turn < cured:  # else the records have shown no place for it
            had_a_turn = remedy.untried != cause_entry.CONVERTED
            yield replace(remedy, untried=_ENDED) if had_a_turn and 0 <= cured < cure_form(remedy.kind).turn else remedy


def keeping(modules: Sequence[str], half: Sequence[str]) -> str:
    """Code that keeps modules, and the loss code where it is among them, in float32; half parameters in them too."""
    by_model: dict[str, list[str]] = {}
    for name in modules:
        if name != LOSS_CODE:
            number, inner = own_words.of_which_model(name)
            by_model.setdefault("model" if number is None else f"models[{number}]", []).append(inner)
    lines = [f"{model}.float()" for model in by_model] if half else []
    once = "  # once, before the training loop"
    lines += [f"ampscope.keep_fp32({model}, {json.dumps(names)}){once}" for model, names in by_model.items()]
    if LOSS_CODE in modules:
        lines += [
            "with torch.autocast(device_type, enabled=False):  # around the loss, in the loop",
            "    loss = loss_fn(output.float(), target)",
        ]
    return "\n".join(lines)


_NOTHING = ExplicitHalf()
_UNKNOWN = Program()
#: Causes that a larger loss scale may cure.
_OF_SMALL_VALUES = (Cause.FP16_UNDERFLOW, Cause.STAGNATION)


def remedies_tried(
    cause: Cause, tried: Sequence[Tried], explicit: ExplicitHalf = _NOTHING, program: Program = _UNKNOWN
) -> tuple[Remedy, ...]:
    """Returns what replays have tried, as advice: first the changes that cured the step, then those that did not help.

    Among those that cured, changes of values that were good come last, and else what changes least comes first.

    Each remedy says all that its replay did otherwise: what the code asks for by itself is out of autocast's reach.

    Args:
        cause: The cause.
        tried: The replays.
        explicit: The half precision that the code asks for itself.
        program: Lines of the program around the model, where some of it belongs.
    """
    forms = tuple(sorted(other_forms.remedies(tried), key=lambda remedy: bool(remedy.changes_good_values)))
    if CATALOGUE[cause].cured_by_precision is False:
        return *forms, *_once_more(cause, tried)
    scales = _larger_scale(tried, program) if cause in _OF_SMALL_VALUES else _scale(tried, program)
    advice = [
        *forms,
        *_of_kind(Change.MODULES_FP32, _modules(tried, explicit, program), _fewest(tried)),
        *_wider(tried),
        *_of_kind(Change.CONVERSIONS, _conversions(tried), tried),
        *_of_kind(Change.SCALE, scales, ()),
        *_of_kind(Change.BF16, _bf16(tried, explicit, program), tried),
        *_of_kind(Change.FP32, _fp32(tried, explicit, program), tried),
    ]
    return tuple(sorted(advice, key=lambda remedy: (not remedy.verified, bool(remedy.changes_good_values))))


def _once_more(cause: Cause, tried: Sequence[Tried]) -> Iterator[Remedy]:
    """Yields the advice to take a step again that failed once, and twice gave the same finite values when run again."""
    again = [each for each in tried if each.change == Change.NONE]
    if cause is Cause.HARDWARE_TRANSIENT and again:
        yield Remedy(
            text="Leave the step out and go on, or take it again: run twice more on the same values, it was finite. "
            "Nothing in the code is to be changed for it.",
            code="if not loss.isfinite():\n    optimizer.zero_grad()\n    continue  # a GradScaler skips such a step",
            verified=all(each.outcome == Trial.FINITE and not each.reason for each in again),
            kind=Change.NONE,
        )


def _of_kind(change: Change, advice: Iterator[Remedy], tried: Sequence[Tried]) -> Iterator[Remedy]:
    """Remedies of one change; what cured, with what it costs."""
    found = [each for each in tried if each.change == change]
    for remedy in advice:
        yield replace(remedy, kind=change, cost=other_forms.cost(found) if remedy.verified else None)


def _conversions(tried: Sequence[Tried]) -> Iterator[Remedy]:
    for outcome, verified in ((Trial.FINITE, True), (Trial.NONFINITE, False)):
        for each in came_out(tried, Change.CONVERSIONS, outcome)[:1]:
            yield take_out(each.conversions or (), verified=verified)


def take_out(lines: Sequence[CodeLine], *, verified: bool | None = None) -> Remedy:
    """The advice not to convert to half precision by hand."""
    also = " and change nothing else" if verified is False else ", or convert to float32 there"
    return Remedy(
        text=f"Take out {explicit_half.places(lines)}{also}.",
        code=explicit_half.rewritten(lines, "float32"),
        diff=own_words.of_conversions(lines, "float32") if verified is not False else None,
        verified=verified,
        untried=cause_entry.TURN,
    )


def _with_explicit(remedy: Remedy, dtype: str, lines: Sequence[CodeLine], half_values: Sequence[str]) -> Remedy:
    """A remedy together with what else its replay had in another dtype: conversions, and what was half from outside."""
    text, code, diff = remedy.text, remedy.code, remedy.diff if not half_values else None
    if lines:
        text = f"Take out {explicit_half.places(lines)} (or convert to {dtype}), and {text[:1].lower()}{text[1:]}"
        code = "\n".join(filter(None, (code, explicit_half.rewritten(lines, dtype))))
        diff = joined([diff, own_words.of_conversions(lines, dtype)]) if diff else None
    if half_values:
        text += f" What is half precision by itself has to be {dtype} too: {listed(half_values, explicit_half.NAMED)}."
    return replace(remedy, text=text, code=code, diff=diff)


def _modules(tried: Sequence[Tried], explicit: ExplicitHalf, program: Program) -> Iterator[Remedy]:
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
        keep = replace(keep, diff=own_words.of_kept(fewest.modules, program))
        yield _with_explicit(keep, "float32", lines, half)
    for each in came_out(tried, Change.MODULES_FP32, Trial.NONFINITE)[:1]:
        alone = " alone" if len(each.modules) == 1 else ""
        keep = Remedy(text=f"Keep {modules_in_words(each.modules)}{alone} in float32.", verified=False)
        yield _with_explicit(keep, "float32", each.conversions or (), ())


def _converted(tried: Tried, explicit: ExplicitHalf) -> tuple[CodeLine, ...]:
    """The conversions that a replay replaced; where that was not recorded, the one that the failure stems from."""
    return explicit.conversions if tried.conversions is None else tried.conversions


def _is_inside(name: str, modules: Sequence[str]) -> bool:
    return any(not module or name.startswith(f"{module}.") for module in modules)


def _locally(tried: Sequence[Tried]) -> list[Tried]:
    """Returns the replays that cured the step with some modules in float32, and not the whole model."""
    return [each for each in came_out(tried, Change.MODULES_FP32, Trial.FINITE) if "" not in each.modules]


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


def _larger_scale(tried: Sequence[Tried], program: Program) -> Iterator[Remedy]:
    """The loss scale for gradients that are too small."""
    for each in came_out(tried, Change.SCALE, Trial.FINITE)[:1]:
        scale = in_words(each.scale or 0.0)
        yield Remedy(
            text=f"Start with a larger loss scale: at {scale} the gradients of this step are whole.",
            code=f"scaler = torch.amp.GradScaler(init_scale={each.scale!r})",
            diff=own_words.of_scaler(program, each.scale or 0.0),
            verified=True,
        )
    for each in came_out(tried, Change.SCALE, Trial.NONFINITE)[:1]:
        yield Remedy(text=f"A larger loss scale: one of {in_words(each.scale or 0.0)} does not help.", verified=False)


def _scale(tried: Sequence[Tried], program: Program) -> Iterator[Remedy]:
    fits = max((each.scale or 0.0 for each in came_out(tried, Change.SCALE, Trial.FINITE)), default=0.0)
    if fits > 1:
        yield Remedy(
            text=f"Start with a loss scale that fits: the gradients of this step are finite at {in_words(fits)}.",
            code=f"scaler = torch.amp.GradScaler(init_scale={fits!r})",
            diff=own_words.of_scaler(program, fits),
            verified=True,
        )
    elif not fits and came_out(tried, Change.SCALE, Trial.NONFINITE):
        yield Remedy(text="Lower the loss scale: even a scale of 1 does not help.", verified=False)


def _bf16(tried: Sequence[Tried], explicit: ExplicitHalf, program: Program) -> Iterator[Remedy]:
    for outcome, verified in ((Trial.FINITE, True), (Trial.NONFINITE, False)):
        for each in came_out(tried, Change.BF16, outcome)[:1]:
            lines, half_values = _converted(each, explicit), explicit.half_values
            diff = own_words.of_autocast(program, "bfloat16") if verified else None
            yield _with_explicit(replace(USE_BFLOAT16, verified=verified, diff=diff), "bfloat16", lines, half_values)


def _fp32(tried: Sequence[Tried], explicit: ExplicitHalf, program: Program) -> Iterator[Remedy]:
    """Float32 for everything: the last of what helps, because it gives up what mixed precision is for."""
    whole = [each for each in came_out(tried, Change.MODULES_FP32, Trial.FINITE) if "" in each.modules]
    cured = [*whole, *came_out(tried, Change.FP32, Trial.FINITE)]
    if came_out(tried, Change.FP32, Trial.NONFINITE):
        yield Remedy(text="More precision: float32 everywhere.", verified=False)
    elif cured and not _locally(tried) and not came_out(tried, Change.CONVERSIONS, Trial.FINITE):
        lines, half_values = _converted(cured[-1], explicit), explicit.half_values
        part = "" if whole or lines or half_values else ", or switch it off around the part that fails"
        weights = "model.float()\n" if explicit.weights.parameters or explicit.weights.buffers else ""
        without = Remedy(
            text=f"Compute in float32: leave autocast out{part}.",
            code=f"{weights}with torch.autocast(device_type, enabled=False):\n    loss = loss_fn(model(x.float()), y)",
            verified=True,
            diff=own_words.of_autocast(program, "float32"),
        )
        yield _with_explicit(without, "float32", lines, half_values)


#: Where loss and gradients are finite, and what is wrong shows elsewhere.
_FLOAT32_ALONE = frozenset(
    {
        *(Trigger.NONFINITE_CARRIED, Trigger.BUFFER_STANDS_STILL, Trigger.UPDATES_LOST),
        *(Trigger.ABSORBED_OVERFLOW, Trigger.INFORMATION_LOST),
    }
)
#: Steps on which a change proves nothing.
_NOTHING_TRIED: dict[str | None, str] = {
    ReplayStatus.RECEIVED: "nothing that this rank does otherwise changes what the others sent",
    ReplayStatus.DIVERGED: "the step did not come out the same when it was run again",
}


def remedies(
    cause: Cause,
    *,
    op: str = "",
    module: str = "",
    reason: Reason = NOTHING_MORE,
    explicit: ExplicitHalf = _NOTHING,
    tried: Sequence[Tried] = (),
    program: Program = _UNKNOWN,
) -> tuple[Remedy, ...]:
    """The cures for a cause.

    Args:
        cause: The cause.
        op: The op at the origin.
        module: The module it ran in.
        reason: What was seen.
        explicit: The half precision that the code asks for itself.
        tried: The replays.
        program: Lines of the program around the model.
    """
    if isinstance(reason, ScaleInLoop):  # the number that the loop took stays what it was in a replay at another scale
        tried = [each for each in tried if each.change != Change.SCALE]
    changes = frozenset(each.change for each in tried)
    occurrence = Occurrence(op=op, module=module, reason=reason, explicit_half=explicit.is_cause, tried=changes)
    advice = CATALOGUE[cause].advice(occurrence)
    if explicit.conversions and not occurrence.has_tried(Change.CONVERSIONS):
        advice = (take_out(explicit.conversions), *advice)
    proved = remedies_tried(cause, tried, explicit, program)
    helped = [remedy for remedy in proved if remedy.verified]
    return (*helped, *beside(advice, proved), *(remedy for remedy in proved if not remedy.verified))


def is_tried_by_replays(remedy: Remedy) -> bool:
    """Whether it is of a kind that replays try on a step, and none has tried it; weights are from before the step."""
    return remedy.verified is None and remedy.kind not in ("", Change.FP32)


def why_untried(incident: Incident) -> str:
    """Why no replay has tried anything more on an incident; empty where nothing stood in its way."""
    if incident.trigger in _FLOAT32_ALONE:
        return "of what goes wrong like this, replays try float32 alone"
    if incident.replay == ReplayStatus.UNAVAILABLE and not other_forms.are_of_optimizer(incident.tried):
        return incident.replay_reason
    if incident.replay and not incident.tried:
        return _NOTHING_TRIED.get(incident.replay, "this step got no replay with a change (replay_budget=)")
    return next((each.reason for each in incident.tried if each.outcome == Trial.UNAVAILABLE), "")
