"""Chooses the cures for a step that went bad, by what its replays have shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from typing import Any, NamedTuple

from torch import nn

from ampscope.capture.changes import failure
from ampscope.capture.changes.replaced_calls import LossForms
from ampscope.capture.changes.replay_results import ReplayResult, Symptom, TrialResult
from ampscope.capture.events import StepAttempt
from ampscope.capture.heal.form_cures import FormOfLossCode, OneForm
from ampscope.capture.heal.lasting_cure import LastingCure, ScaleRaised
from ampscope.capture.heal.module_cures import Both, ConversionsWider, ModulesKept
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.user_line import Place
from ampscope.capture.tracing.sites import Sites
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.cures.call_form import ROUNDING, CallPlace
from ampscope.trace.schema import LOSS_CODE, Change, Phase, ReplayStatus, Trial
from ampscope.trace.vocabulary import LOSS_APART, NOT_DETERMINISTIC


class BadStep(NamedTuple):
    """A step that went bad, and what its replays have shown."""

    attempt: StepAttempt
    recording: TapedStep
    symptom: Symptom  #: what was not finite
    rows: TracedRows | None  #: of its faithful replay; None where there was none, or it shows nothing
    outcome: ReplayResult
    tried: Sequence[TrialResult]

    @property
    def is_only_of_loss(self) -> bool:
        """Whether its gradients are finite, and nothing but its loss, or state, is not."""
        return not self.symptom.gradients

    def came_out(self, change: Change, outcome: Trial) -> bool:
        """Whether a change was tried and came out so."""
        return any(each.change is change and each.result.outcome is outcome for each in self.tried)

    @property
    def is_not_its_own(self) -> bool:
        """Whether the same calls came out finite, twice, with the same values: the step itself was in order."""
        again = [each.result for each in self.tried if each.change is Change.NONE]
        twice = bool(again) and all(each.outcome is Trial.FINITE and each.reason != NOT_DETERMINISTIC for each in again)
        return self.outcome.status is ReplayStatus.NOT_REPRODUCED and twice

    @property
    def is_of_scale(self) -> bool:
        """Whether a lower loss scale alone makes it finite, or may: the scaler is there for that."""
        if self.came_out(Change.SCALE, Trial.FINITE):
            return True
        located = failure.located(self.rows, scaled=self.attempt.scaling is not None) if self.rows else None
        return located is not None and located.by_scale and not self.came_out(Change.FP32, Trial.NONFINITE)

    @property
    def is_beyond_precision(self) -> bool:
        """Whether the step is not finite in float32 either, so that neither dtypes nor the scale have a part in it."""
        if self.rows is None or self.outcome.status is not ReplayStatus.EXACT:
            return False
        if self.came_out(Change.FP32, Trial.NONFINITE):
            return True
        located = failure.located(self.rows, scaled=self.attempt.scaling is not None)
        return located is not None and not located.dtypes and not located.by_scale


def lasting(
    tried: Sequence[TrialResult],
    rows: TracedRows | None,
    sites: Sites,
    models: Models,
    scaler: Any,
    loss: LossForms,
) -> Iterator[LastingCure]:
    """The cures that last among the changes that were tried with success, those that change least first.

    Args:
        tried: The changes.
        rows: The records of the step's faithful replay; None where there are none.
        sites: The program points seen so far, which tell in whose code a conversion stands.
        models: The watched models.
        scaler: The loop's; None without one.
        loss: The forms that calls of the loss code have.
    """
    found = [each for each in tried if each.result.outcome is Trial.FINITE and not misses_float32(each, tried)]
    modules = {models.names[id(module)]: module for module in models.modules}
    yield from filter(None, (_one_form(each, sites, modules, loss) for each in found))
    located = failure.located(rows, scaled=False) if rows is not None else None
    for each in found:
        converting = _converting(each.conversions, sites, modules) if each.conversions else None
        if converting and each.change in (Change.CONVERSIONS, Change.MODULES_FP32):
            first = {name: converting[name] for name in located.modules if name in converting} if located else {}
            if first and first.keys() != converting.keys():
                yield ConversionsWider(first, _places(each.conversions, first, sites))
            yield ConversionsWider(converting, _places(each.conversions, converting, sites))
        if each.change is Change.MODULES_FP32 and set(each.modules) <= modules.keys():
            kept = ModulesKept({name: modules[name] for name in each.modules})
            if not each.conversions:
                yield kept
            elif converting:
                yield Both(kept, ConversionsWider(converting, _places(each.conversions, converting, sites)))
    for each in found:
        raised = each.scale if each.change is Change.SCALE else None
        if raised is not None and scaler is not None and raised > 1.0:
            yield ScaleRaised(scaler, raised)


def misses_float32(trial: TrialResult, tried: Iterable[TrialResult]) -> bool:
    """Whether a part in float32 gives another loss than all of it: what went out of range is swallowed somewhere."""
    if trial.change not in (Change.MODULES_FP32, Change.CONVERSIONS):
        return False
    wide = [each.result.loss for each in tried if each.change is Change.FP32 and each.result.outcome is Trial.FINITE]
    loss, reference = trial.result.loss, next((each for each in wide if each is not None), None)
    if loss is None or reference is None or not isfinite(reference):
        return False
    return abs(loss - reference) > LOSS_APART * max(abs(loss), abs(reference))


def _one_form(trial: TrialResult, sites: Sites, modules: dict[str, nn.Module], loss: LossForms) -> OneForm | None:
    """A call in another form; None where that changes values that were good, or is not the whole of what was tried."""
    used = trial.form
    if trial.change is not Change.FORM or used is None or trial.result.reason:
        return None
    form, at = used.made_by, CallPlace(used.place.file, used.place.line)
    if used.good_change is None or used.good_change > ROUNDING:
        return None
    names = _whose_code(at, sites)
    made = _whose_code(form.made_at, sites) if form.made_at is not None else names
    held = {name: modules[name] for name in names if name in modules}
    cure: OneForm | None = None
    if names == made == [LOSS_CODE] and form.live_as:
        cure = FormOfLossCode(form, at, loss)
    elif held and len(held) == len(names) and form.live_as and not form.in_loss_alone:
        cure = OneForm(form, at, held)
    if cure is not None:
        cure.fitting_scale = trial.scale
    return cure


def _whose_code(at: CallPlace, sites: Sites) -> list[str]:
    """The modules that run a line, and the loss code if that does; the innermost in which all of them lie."""
    points = [point for point in sites if at.is_at(point.place) and point.phase != Phase.BACKWARD]
    names = dict.fromkeys(LOSS_CODE if point.phase == Phase.LOSS else point.module for point in points)
    return [name for name in names if not any(_is_inside(name, other) for other in names)]


def _is_inside(name: str, other: str) -> bool:
    """Whether a module lies in another one, whose line then has called it."""
    return name not in (other, LOSS_CODE) and name.startswith(f"{other}." if other else "")


def _converting(places: Sequence[Place], sites: Sites, modules: dict[str, nn.Module]) -> dict[str, nn.Module] | None:
    """The modules in whose own code the conversions stand; None where one stands outside of all."""
    points = [point for point in sites if point.place in places]
    names = dict.fromkeys(LOSS_CODE if point.phase == Phase.LOSS else point.module for point in points)
    known = {name: modules[name] for name in names if name in modules}
    return known if known and len(known) == len(names) else None


def _places(places: Sequence[Place], modules: Iterable[str], sites: Sites) -> tuple[str, ...]:
    """Returns the conversions that stand in the code of some modules, as a user would say it."""
    there = {point.place for point in sites if point.module in modules}
    return tuple(f"{place.file}:{place.line}" for place in places if place in there)
