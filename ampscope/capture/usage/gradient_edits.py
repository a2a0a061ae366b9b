"""Follows what a loop does to gradients that carry the loss scale: right is what would be the same without it."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.function_names import is_in_place
from ampscope.capture.torch_support.torch_private import storage_key
from ampscope.capture.torch_support.user_line import Place, user_place
from ampscope.capture.usage import scale_degree
from ampscope.capture.usage.clip_factors import Factors
from ampscope.capture.usage.scale_degree import CONSTANT, SCALED, Power
from ampscope.trace.vocabulary import Cause, MistakeForm

#: A scale below this is too easily a number of the loop's own.
_SMALLEST_SCALE = 64
#: Micro-batches by which a loop may divide together with the scale.
_MOST_PARTS = 4096
_ROUNDING = 1e-6
_LARGEST_INT = 1 << 62
_READS = frozenset({"item", "__float__", "__bool__"})
#: Functions that write one of their arguments, by its position.
_COPIES = {"copy": 1, "set": 1, "setitem": 2}


class Mistake(NamedTuple):
    """An edit, or a decision, that depends on the loss scale."""

    cause: Cause
    place: Place | None
    step: int | None = None  #: where it is not the present one
    form: MistakeForm | None = None


class Edits:
    """The loop's own work on gradients between backward and optimizer.

    Args:
        gradients: Gives the gradients as they are now.
        step: Gives the number of the present step.
    """

    def __init__(self, gradients: Callable[[], Iterable[Tensor]], step: Callable[[], int]) -> None:
        self._present = gradients
        self._step = step
        self._gradients: dict[tuple[int, int], Power] | None = None  # by memory; None: not looked at since backward
        self._storages: set[int] = set()
        self._ids: set[int] = set()
        self._known: dict[int, tuple[weakref.ref[Tensor], Power]] = {}
        self._scales: deque[float] = deque(maxlen=8)  # numbers the loop got by asking for the scale
        self._factors = Factors()
        self._decision: Mistake | None = None
        self._mistake: Mistake | None = None
        self.unscaled_at: Place | None = None  #: where the loop last divided the scale out by itself

    # -- what usage tells ---------------------------------------------------------------------------------------

    def scale_read(self, scale: float) -> None:
        """The loop asked for the scale, and may calculate with it."""
        if scale >= _SMALLEST_SCALE and scale not in self._scales:
            self._scales.append(scale)

    def scale_tensor(self, scale: Tensor | None) -> None:
        """The scaler keeps its scale in this tensor."""
        if scale is not None and id(scale) not in self._known:
            self._remember(scale, Power(1.0, of_scale=True))

    def scaled_anew(self, result: Any) -> None:
        """``torch.autograd.grad`` of a scaled loss returned these."""
        for tensor in tensor_tree.tensors(result):
            self._remember(tensor, SCALED)

    def multiplied(self, func: Callable[..., Any], args: Any) -> None:
        """Something was computed before backward in a run without a scaler: it may be a scale of the loop's own."""
        if len(args) > 1 and scale_degree.plain_name(func) in ("mul", "imul", "rmul"):
            numbers = (float(each) for each in args[:2] if isinstance(each, (int, float)))
            for number in numbers:
                self.scale_read(number)

    def backward_done(self) -> None:
        """Gradients are scaled ones again, and may be other tensors."""
        self._gradients = None
        self._storages.clear()
        self._ids.clear()

    def new_iteration(self) -> None:
        """A forward begins after a step: what was computed from the old gradients is history."""
        self.backward_done()
        self._known = {key: (ref, power) for key, (ref, power) in self._known.items() if power.of_scale and ref()}
        self._factors.forget_reads()
        self.take()

    def take(self) -> Mistake | None:
        """The first mistake since the last call; a decision counts when no edit is one."""
        found = self._mistake or self._decision
        self._mistake = self._decision = None
        return found

    def unscaled_by_hand(self, gradients: Iterable[Tensor]) -> bool:
        """Whether the loop itself has divided the scale out of any of ``gradients``."""
        return bool(self._gradients) and any(self.power_of(gradient).unscaled for gradient in gradients)

    # -- what torch ran -----------------------------------------------------------------------------------------

    def saw(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any, *, after_backward: bool) -> None:
        """A torch function ran outside the models."""
        if after_backward and self._gradients is None:
            self._look()
        if not self._storages and not self._may_depend((*args, *kwargs.values())):
            return
        name = scale_degree.plain_name(func)
        if getattr(func, "__name__", "") in _READS:
            self._read(name, args, result)
        elif name == "get":
            self._got(args, result)
        elif is_in_place(func, kwargs) and name not in ("register_hook", "retain_grad"):
            self._written(func, name, args, kwargs)
        else:
            power = scale_degree.combined(name, args, kwargs, self._power_in(name))
            if power != CONSTANT:
                for tensor in tensor_tree.tensors(result):
                    if self._memory(tensor) is None:  # a view of a gradient is looked up by its memory
                        self._remember(tensor, power)

    def power_of(self, value: Any) -> Power:
        """How ``value`` depends on the loss scale, as far as it was followed."""
        if isinstance(value, Tensor):
            known = self._known.get(id(value))
            if known is not None and known[0]() is value:
                return known[1]
            return self._of_gradient(value)
        if isinstance(value, (list, tuple)):
            return next((power for power in map(self.power_of, value) if power != CONSTANT), CONSTANT)
        return self._of_number(float(value)) if _is_number(value) else CONSTANT

    # -- inside -------------------------------------------------------------------------------------------------

    def _may_depend(self, values: Iterable[Any]) -> bool:
        """A quick look at a function's arguments, for the many that have nothing to do with the scale."""
        for value in values:
            if id(value) in self._known or isinstance(value, (list, tuple)):
                return True
            if self._scales and _is_number(value) and self._of_number(float(value)) != CONSTANT:
                return True
        return False

    def _look(self) -> None:
        self._gradients = {}
        present = [gradient for gradient in self._present() if gradient.layout is torch.strided]
        self._storages, self._ids = {storage_key(gradient) for gradient in present}, {id(each) for each in present}

    def _of_gradient(self, tensor: Tensor) -> Power:
        memory = self._memory(tensor)
        return (self._gradients or {}).get(memory, SCALED) if memory else CONSTANT

    def _memory(self, tensor: Tensor) -> tuple[int, int] | None:
        """Where a gradient, or a view of one, lies; None for any other tensor."""
        if not self._storages or tensor.layout is not torch.strided:
            return None
        key = storage_key(tensor)
        return (key, int(tensor.storage_offset())) if key in self._storages else None

    def _of_number(self, number: float) -> Power:
        """A multiple of the scale, or one over such a multiple; every other number is a constant."""
        for scale in self._scales if math.isfinite(number) else ():
            ratio = number / scale
            if _is_count(ratio):
                return Power(1.0, of_scale=True)
            if number and _is_count(1.0 / (number * scale)):
                return Power(-1.0, of_scale=True)
        return CONSTANT

    def _power_in(self, name: str) -> Callable[[Any], Power]:
        """`power_of`, where thresholds count as scaled too when they are a round number times the scale."""
        return self._of_threshold if scale_degree.bounds(name) else self.power_of

    def _of_threshold(self, value: Any) -> Power:
        power = self.power_of(value)
        if power == CONSTANT and isinstance(value, float) and any(_is_round(value / scale) for scale in self._scales):
            return SCALED
        return power

    def _remember(self, tensor: Tensor, power: Power) -> None:
        self._known[id(tensor)] = (weakref.ref(tensor), power)

    def _got(self, args: Any, result: Any) -> None:
        """An attribute was read: a view of a gradient needs no note, one of another tensor passes its power on."""
        if isinstance(result, Tensor) and args and self._memory(result) is None:
            power = self.power_of(args[0])
            if power != CONSTANT and not isinstance(args[0], torch.nn.Parameter):
                self._remember(result, power)

    def _read(self, name: str, args: Any, result: Any) -> None:
        power = self.power_of(args[0])
        if power.of_scale and name != "bool":
            self.scale_read(float(result))
        elif name == "bool":
            if power.mixed and self._decision is None:
                self._decision = Mistake(Cause.MISUSE_NO_UNSCALE, user_place(), form=MistakeForm.DECISION_ON_SCALED)
        elif power.degree or power.mixed:
            self._factors.read(float(result))

    def _written(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> None:
        """Something was overwritten; gradients are looked at more closely."""
        written = kwargs.get("out", args[0] if args else None)
        source = args[_COPIES[name]] if name in _COPIES and len(args) > _COPIES[name] else None
        power = self.power_of(source) if source is not None else CONSTANT
        if name not in _COPIES:
            power = scale_degree.combined(name, args, kwargs, self._power_in(name))
        if power == CONSTANT and name in _COPIES:
            return
        if isinstance(source, Tensor) and self._becomes_gradient(func, args[0]):
            written = source
            self._storages.add(storage_key(source))
        for tensor in tensor_tree.tensors(written):
            self._overwritten(tensor, name, args, power)

    def _becomes_gradient(self, func: Callable[..., Any], target: Any) -> bool:
        """Whether an assignment gives a parameter another gradient, or a gradient another memory."""
        attribute = getattr(func, "__self__", None)
        return attribute is torch.Tensor.grad or (attribute is torch.Tensor.data and id(target) in self._ids)

    def _overwritten(self, tensor: Tensor, name: str, args: Any, power: Power) -> None:
        memory = self._memory(tensor)
        if memory is None:
            if power != CONSTANT:
                self._remember(tensor, power)
            return
        if power == CONSTANT and self.power_of(tensor).unscaled:
            return
        self._known.pop(id(tensor), None)
        if power.mixed or (power.degree != 1 and not power.unscaled):
            self._note(Mistake(power.mixed or Cause.MISUSE_CLIP_BEFORE_UNSCALE, user_place()))
        elif name in ("mul", "div", "imul", "idiv") and len(args) > 1:
            suspect = self._factors.factor(name, args[1], self._scales, self._step())
            if suspect is not None:
                self._note(Mistake(Cause.MISUSE_CLIP_BEFORE_UNSCALE, user_place(), suspect))
        if power.unscaled:
            self.unscaled_at = user_place()
        if self._gradients is not None and not power.mixed:
            self._gradients[memory] = power

    def _note(self, mistake: Mistake) -> None:
        self._mistake = self._mistake or mistake


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < _LARGEST_INT and value is not True)


def _is_count(ratio: float) -> bool:
    whole = round(ratio) if 0.5 < ratio < _MOST_PARTS + 1 else 0
    return whole >= 1 and abs(ratio - whole) <= _ROUNDING * ratio


def _is_round(number: float) -> bool:
    """Whether a number has three digits at most."""
    return 0 < number < math.inf and abs(float(f"{number:.3g}") - number) <= _ROUNDING * number
