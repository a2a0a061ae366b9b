"""Changes that last are in force: how many, what they cost, whether still needed, and made again on resuming."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import nn

from ampscope.capture.budgets import ReplayBudget
from ampscope.capture.changes.replaced_calls import LossForms
from ampscope.capture.changes.replay_change import ReplayChange
from ampscope.capture.events import StepAttempt
from ampscope.capture.heal.form_cures import FormOfLossCode, OneForm
from ampscope.capture.heal.healing import Healing, HealingLog, TrainingChange
from ampscope.capture.heal.lasting_cure import LastingCure, ScaleBound
from ampscope.capture.heal.module_cures import Both, ConversionsWider, ModulesKept
from ampscope.capture.keep_fp32 import ModuleOutputs
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.tensor_tree import torch_dtype
from ampscope.cures.catalogue import read_form
from ampscope.errors import AmpscopeError
from ampscope.trace.schema import LOSS_CODE, CureKind, said

#: Times that a step is run again, each way.
RUNS_EACH_WAY = 3
#: Seconds; what differs by less cannot be told from noise.
LEAST_SECONDS = 1e-3


def share_of_time(with_it: Sequence[float], without: Sequence[float], step: float) -> float:
    """Returns how much longer a step takes with a change, as a share; 0.0 where that is no more than replays vary.

    Replays, not steps before and after: those may take longer for reasons of their own, such as longer sequences.

    Args:
        with_it: Seconds that replays of a step took with the change.
        without: Seconds of replays of the same step without it.
        step: Seconds of a step as it runs, with the change; 0.0 where none was seen. What the optimizer and the data
            take, a replay has no part in.
    """
    extra = median(with_it) - median(without)
    if extra < LEAST_SECONDS or min(with_it) <= max(without):
        return 0.0
    return extra / max(median(without), step - extra)


#: Replays without a change that have to be finite, one after another, before it is lifted.
LOOKS = 3
#: A change that was lifted and came back is looked at so many times later.
LATER = 4
#: Steps after which it is measured what a change costs, and steps that have to tell that it is too much.
MEASURED_AFTER, SLOW = 4, 2


Key = tuple[CureKind, tuple[str, ...], str]


@dataclass(slots=True)
class _Lasting:
    """A change in force."""

    cure: LastingCure
    change: TrainingChange
    next_look: int  #: step
    every: int  #: steps between two looks
    finite: int = 0  #: looks in a row
    slow: int = 0  #: steps, one after another, that took too long with it
    is_measured: bool = False

    @property
    def key(self) -> Key:
        """The key by which the change is known when it is gone."""
        return _key(self.cure)


def _key(cure: LastingCure) -> Key:
    return cure.kind, cure.modules, cure.text if cure.kind is CureKind.FORM else ""


class InForce:
    """The changes in force.

    Args:
        settings: What there may be.
        log: Tells what becomes of them.
        loss: The forms that calls of the loss code have.
    """

    def __init__(self, settings: Healing, log: HealingLog, loss: LossForms) -> None:
        self.loss = loss
        self._settings = settings
        self._log = log
        self._held: list[_Lasting] = []
        self._lifted: set[Key] = set()
        self._never: dict[Key, str] = {}  # made again, for a reason
        self._seconds = 0.0  # of the latest good step

    def __bool__(self) -> bool:
        return bool(self._held)

    def why_not(self, cure: LastingCure, *, compiled: bool) -> str:
        """Why a change may not be made beside those in force; empty where it may."""
        if len(self._held) >= self._settings.max_cures:
            return f"there are {self._settings.max_cures} changes in force already (max_cures)"
        if _key(cure) in self._never:
            return self._never[_key(cure)]
        if any(each.key == _key(cure) for each in self._held):
            return f"{cure.text}: that is so already"
        of_calls = cure.kind in (CureKind.CONVERSIONS, CureKind.FORM) and {*cure.modules} - {LOSS_CODE}
        if compiled and of_calls:
            return "the model is compiled, and what its code calls itself cannot be changed in compiled code"
        return ""

    def apply(self, cure: LastingCure, change: TrainingChange) -> bool:
        """Makes a change; returns whether it could be."""
        try:
            cure.apply()
        except AmpscopeError as error:
            self._log.declined(change.step, str(error))
            return False
        every = self._settings.quiet_steps * (LATER if _key(cure) in self._lifted else 1)
        self._held.append(_Lasting(cure, change, change.step + every, every))
        return True

    def hold(self, scaler: Any) -> None:
        """A scaler was updated."""
        for each in self._held:
            if isinstance(each.cure, ScaleBound):
                each.cure.hold(scaler)

    def look(self, attempt: StepAttempt, is_finite: Callable[[ReplayChange], bool], budget: ReplayBudget) -> None:
        """Tries a good step without a change, one at a time, if one is due; risks nothing.

        Args:
            attempt: Of the step, before its weights move.
            is_finite: Runs the step with a change.
            budget: Says whether it may cost a replay.
        """
        due = next((each for each in self._held if self._is_due(each, attempt.step)), None)
        if due is None or not budget.allows_look():
            return
        due.finite = due.finite + 1 if is_finite(due.cure.without()) else 0
        due.every = due.every if due.finite else 2 * due.every
        due.next_look = attempt.step + due.every
        if due.finite >= LOOKS:
            self._lift(due, attempt.step, f"{LOOKS} steps were finite without it when they were run again")

    def _is_due(self, each: _Lasting, step: int) -> bool:
        return bool(each.every) and each.cure.by_finiteness and step >= each.next_look

    def took(self, seconds: float) -> None:
        """A good step took so long."""
        self._seconds = seconds

    def measure(self, step: int, seconds: Callable[[ReplayChange], float | None], budget: ReplayBudget) -> None:
        """Has it measured, once, what a change costs; one that is too slow is lifted, and not made again.

        Args:
            step: A good one, before its weights move.
            seconds: How long the step takes when it is run again with a change of the present state; None where it
                cannot be.
            budget: Says whether there may be replays.
        """
        due = next((each for each in self._held if not each.is_measured and self._is_to_be_measured(each, step)), None)
        if due is None or not budget.allows_look(whatever_it_costs=True):
            return
        pairs = [(seconds(ReplayChange()), seconds(due.cure.without())) for _ in range(RUNS_EACH_WAY)]
        with_it = [each for each, _ in pairs if each is not None]
        without = [each for _, each in pairs if each is not None]
        were_run = len(with_it) == len(without) == len(pairs)
        share = share_of_time(with_it, without, self._seconds) if were_run else 0.0
        due.slow = due.slow + 1 if share > self._settings.max_slowdown else 0
        due.is_measured = not due.slow
        if due.slow >= SLOW:
            self._never[due.key] = f"{due.cure.text} made steps too slow before (max_slowdown)"
            self._lift(due, step, f"a step takes {share:.0%} longer with it (max_slowdown)")

    def _is_to_be_measured(self, each: _Lasting, step: int) -> bool:
        of_modules = bool(each.cure.modules) and LOSS_CODE not in each.cure.modules  # live, it sees the loss code alone
        return of_modules and step >= each.change.step + MEASURED_AFTER

    def settle(self, step: int) -> None:
        """Takes back what cannot stay, as a step has shown; it is not made again."""
        for each in [each for each in self._held if each.cure.why_lifted]:
            self._never[each.key] = f"{each.cure.text} cannot be made: {each.cure.why_lifted}"
            self._lift(each, step, each.cure.why_lifted)

    def _lift(self, each: _Lasting, step: int, why: str) -> None:
        each.cure.lift()
        self._held.remove(each)
        self._lifted.add(each.key)
        self._log.lifted(each.change, step, why)

    def lift_all(self, step: int, why: str) -> None:
        """Takes all of them back."""
        for each in list(self._held):
            self._lift(each, step, why)

    def close(self) -> None:
        """The run is over: tells what makes them permanent, and leaves the model as it was."""
        self._log.closes([each.change for each in self._held])
        for each in self._held:
            each.cure.lift()
        self._held.clear()


def resumed_of_models(
    step: int, text: str, models: Models, loss: LossForms | None = None
) -> tuple[LastingCure, TrainingChange] | None:
    """A change of modules, or of the loss code, from what was written of it; None for others, and of what is not there.

    Args:
        step: At which it was made.
        text: What was written of it.
        models: The watched models.
        loss: The forms that calls of the loss code have; None where these are left alone.
    """
    detail = json.loads(text)
    modules = {models.names[id(module)]: module for module in models.modules}
    if "form" in detail:
        form, formed = read_form(detail["form"]), _modules_found(detail.get("formed"), modules)
        one = OneForm(*form, formed) if form and formed else None
        if form and loss is not None and detail.get("formed") == [LOSS_CODE]:
            one = FormOfLossCode(*form, loss)
        return (one, _resumed_change(step, one, detail)) if one is not None else None
    kept, converted = (_modules_found(detail.get(name), modules) for name in ("kept", "converted"))
    if (not kept and not converted) or kept is None or converted is None:
        return None
    places = tuple(map(str, detail.get("places", ())))
    cure: LastingCure
    if kept and converted:
        cure = Both(ModulesKept(kept, _outputs(detail)), ConversionsWider(converted, places))
    else:
        cure = ModulesKept(kept, _outputs(detail)) if kept else ConversionsWider(converted, places)
    return cure, _resumed_change(step, cure, detail)


def resumed_of_scaler(step: int, text: str, scaler: Any) -> tuple[LastingCure, TrainingChange] | None:
    """A bound on the loss scale; None for other changes."""
    detail = json.loads(text)
    bound = detail.get("bound")
    if not isinstance(bound, (int, float)):
        return None
    cure = ScaleBound(scaler, float(bound))
    return cure, _resumed_change(step, cure, detail)


def _outputs(detail: dict[str, Any]) -> dict[str, ModuleOutputs]:
    always, fitting = detail.get("outputs") or {}, detail.get("fitting_outputs") or {}
    asked = [(always, False), (fitting, True)]
    return {name: ModuleOutputs(torch_dtype(each), fits) for names, fits in asked for name, each in names.items()}


def _modules_found(names: Any, modules: dict[str, nn.Module]) -> dict[str, nn.Module] | None:
    """Modules by name; None where one is not there."""
    asked = [str(name) for name in names or ()]
    return {name: modules[name] for name in asked} if set(asked) <= modules.keys() else None


def _resumed_change(step: int, cure: LastingCure, detail: dict[str, Any]) -> TrainingChange:
    kind = said(CureKind, str(detail.get("kind", "")), cure.kind)
    return TrainingChange(step, int(detail.get("optimizer", 0)), kind, cure.text, cure.modules, cure.code, cure.detail)
