"""A repair is done about one bad step and lasts no longer: rows or the step left out, state put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.changes.replay_change import ReplayChange
from ampscope.capture.cures import cure_search
from ampscope.capture.events import ScaleState, StepAttempt
from ampscope.capture.isolation.state_snapshot import StateSnapshot
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.torch_support.sharding import local
from ampscope.capture.tracing.light_statistics import can_be_bad, finite
from ampscope.trace.schema import CureKind

#: Of a weight's elements, at most this share may be set to zero; a single one always may.
FEW = 0.01


class ElementsZeroed(ReplayChange):
    """Weights with zeros where they are not finite.

    Args:
        bad: Those weights, each with which of its elements are bad.
    """

    def __init__(self, bad: list[tuple[nn.Parameter, Tensor]]) -> None:
        super().__init__()
        self._bad = bad
        zeroed = ((each, each.detach().masked_fill(where, 0.0)) for each, where in bad)
        self.weights = {id(each): nn.Parameter(values, each.requires_grad) for each, values in zeroed}

    def is_all_of(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer steps all of them: as it writes into them, no graph is used that has read them."""
        own = set(map(id, OptimizerView(optimizer).parameters))
        return all(id(each) in own for each, _ in self._bad)

    def make(self) -> None:
        """Zeroes the elements in the live weights, whatever has become of others since."""
        with torch.no_grad():
            for each, where in self._bad:
                each.masked_fill_(where, 0.0)


def make_due(due: list[ElementsZeroed]) -> None:
    """Zeroes the elements that had to wait for the end of a step: other losses might still have gone backward."""
    while due:
        due.pop().make()


class Repair(NamedTuple):
    """A change that may make a step finite that float32 does not."""

    kind: CureKind
    text: str  #: as a clause
    change: ReplayChange
    rivals: Iterable[ReplayChange] = ()  #: with each of which the step must fail, or none is known to be right


def repairs_of_step(step: TapedStep, models: Models) -> Iterator[Repair]:
    """Lists what may help on a step, the smaller changes first."""
    named = {name: weight for name, weight in models.parameters.values() if is_bad_weight(weight)}
    plain = (each for each in named.values() if type(each) is nn.Parameter and each.layout is torch.strided)
    bad = [(weight, _bad_elements(weight)) for weight in plain]
    few = all(int(where.sum()) <= max(1, FEW * where.numel()) for _, where in bad)
    if bad and few and len(bad) == len(named):
        count = sum(int(where.sum()) for _, where in bad)
        elements = "1 element" if count == 1 else f"{count} elements"
        text = f"{elements} of {', '.join(named)} set to zero, not finite as the step began"
        yield Repair(CureKind.WEIGHTS, text, ElementsZeroed(bad))
    without = cure_search.bad_rows_left_out(step, models) if not named else None
    if without is not None:
        text = f"{without.left_out} rows of its batch left out, which came in not finite"
        yield Repair(CureKind.ROWS_LEFT_OUT, text, without, without.rivals(step))


def is_bad_weight(weight: Tensor) -> bool:
    """Whether a weight holds what it never should: one that is frozen may hold infinities, as masks do."""
    return not finite(weight) and (weight.requires_grad or bool(local(weight).detach().isnan().any()))


def _bad_elements(weight: nn.Parameter) -> Tensor:
    return ~weight.detach().isfinite() if weight.requires_grad else weight.detach().isnan()


class PoisonedBuffer(NamedTuple):
    """A buffer, or a tensor in a plain attribute, that a step found not finite."""

    module: nn.Module
    name: str
    tensor: Tensor  #: that it was when the step began
    found: Tensor  #: what it held then
    before: Tensor  #: its last finite value


#: By qualified name.
Poisoned = dict[str, PoisonedBuffer]


def found_poisoned(state: StateSnapshot, models: Models) -> Poisoned:
    """Finds what was not finite as a step began, but was as the step before it did."""
    poisoned: Poisoned = {}
    for module, name, _ in state.statistics():
        tensor, before = state.buffer(module, name), state.buffer_before(module, name)
        start = state.at_start(tensor) if tensor is not None and can_be_bad(tensor) else None
        if tensor is not None and start is not None and before is not None and not finite(start) and finite(before):
            poisoned[_name(module, name, models)] = PoisonedBuffer(module, name, tensor, start, before.clone())
    return poisoned


def poisoned_out_of_reach(state: StateSnapshot) -> str:
    """A tensor in what an attribute holds that a step found not finite; empty where there is none."""
    nested = (each for each in state.attribute_tensors() if each.is_nested)
    starts = ((each.name, state.at_start(each.tensor)) for each in nested)
    return next((name for name, start in starts if start is not None and not finite(start)), "")


def begin_from(state: StateSnapshot, poisoned: Poisoned, *, finite_values: bool) -> None:
    """Has replays of the step begin from the last finite values, or from what it really found."""
    for each in poisoned.values():
        state.restore(each.tensor, each.before if finite_values else each.found)


def put_back_poisoned(poisoned: Poisoned) -> None:
    """Gives the model's own their last finite values."""
    for each in poisoned.values():
        give_value(each.module, each.name, each.tensor, each.before)


def undo_poisoning(state: StateSnapshot) -> None:
    """Gives back what they held before a step that has made them non-finite."""
    for module, name, buffer in list(state.statistics()):
        tensor = state.buffer(module, name) if can_be_bad(buffer) and not finite(buffer) else None
        start = state.at_start(tensor) if tensor is not None else None
        if start is not None and finite(start):
            give_value(module, name, tensor, start)


def give_value(module: nn.Module, name: str, tensor: Tensor | None, value: Tensor) -> None:
    """Gives a buffer or an attribute a value: in place, where it is still ``tensor``; else as a new tensor."""
    where: Any = module._buffers if name in module._buffers else vars(module)
    held = where.get(name)
    if not isinstance(held, Tensor):
        return
    if held is tensor and held.shape == value.shape:
        with torch.no_grad():
            held.copy_(value)
    else:
        where[name] = value.detach().to(held.dtype, copy=True)


def _name(module: nn.Module, name: str, models: Models) -> str:
    return ".".join(filter(None, (models.names[id(module)], name)))


class LeavingOut:
    """Leaves steps out, and gives back gradients and the loss scale when they are over.

    Attributes:
        unproved: Whether a step is left out that no scaler skips, though nothing is proved on it.
        in_a_row: Steps, up to the latest, that were left out one after another.
    """

    def __init__(self, models: Models) -> None:
        self.unproved = True
        self.in_a_row = 0
        self._models = models
        self._taken: list[tuple[Tensor, Tensor]] = []  # parameters with the gradients that the loop may still read
        self._scaling: ScaleState | None = None  # before the scaler backs off
        self._overflowed = False  # another step of the same update did, and the scaler is right to back off

    def leave_out(self, attempt: StepAttempt, *, is_called: bool = False) -> str:
        """Leaves a step out, or tells why that cannot be.

        A scaler skips it by itself. Without one, its optimizer finds no gradients. Others of the same step go on, as
        where a scaler skips one of several.

        Args:
            attempt: The step.
            is_called: Its optimizer is called, though there be a scaler, for the gradients are finite.
        """
        if attempt.scaling is not None and not is_called:
            return ""
        view = OptimizerView(attempt.optimizer)
        if view.has_own_step or any(id(parameter) not in self._models.parameters for parameter in view.parameters):
            return "nobody knows what this optimizer does without gradients"
        if any(getattr(attempt.optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")):
            return "functions of the loop's own run with its optimizer and may need the gradients"
        self._taken = list(view.with_gradients)
        for parameter, _ in self._taken:
            parameter.grad = None
        return ""

    def ended(self, attempt: StepAttempt) -> None:
        """An attempt is over."""
        self.in_a_row = self.in_a_row + 1 if attempt.left_out else 0
        taken, self._taken = self._taken, []
        for parameter, gradient in taken:
            if parameter.grad is None:
                parameter.grad = gradient
        if attempt.scaling is not None and (attempt.bad or attempt.on_device):
            self._overflowed = self._overflowed or not attempt.left_out
            self._scaling = self._scaling or attempt.scaling

    def give_scale_back(self) -> None:
        """The scale is what it was, where the scaler has backed off because of what was left out.

        As the loop goes on, ends, or saves the scaler, and not before: a loop that knows a skipped step by the scale
        that falls finds it so.
        """
        before, self._scaling = self._scaling, None
        overflowed, self._overflowed = self._overflowed, False
        if before is not None and before.scale is not None and not overflowed:
            _undo_backoff(before.scaler, before.scale, before.tracker)


def _undo_backoff(scaler: Any, scale: Tensor, tracker: Tensor | None) -> None:
    """Gives a scaler its scale back, on its device; one that the loop has set otherwise stays."""
    now, count = torch_private.scaler_tensors(scaler)
    factor = torch_private.scaler_initial(scaler)["backoff_factor"]
    if now is None or factor is None or now.shape != scale.shape:
        return
    with torch.no_grad():
        backed_off = now == scale * factor
        if count is not None and tracker is not None:
            count.copy_(torch.where(backed_off & (count == 0), tracker, count))
        now.copy_(torch.where(backed_off, scale, now))
