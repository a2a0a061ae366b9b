"""Autograd's graph and the backward passes tell which scaler has scaled a loss, and the gradient of each parameter."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.optim.optimizer import Optimizer

from ampscope.capture.events import WeightsCast
from ampscope.capture.tape.after_backward import EMPTYING
from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.backward_call import factor_of
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.torch_support.sharding import local
from ampscope.capture.torch_support.tensor_tree import HALF
from ampscope.capture.torch_support.torch_private import node_sequence_number
from ampscope.capture.torch_support.user_line import user_place
from ampscope.capture.tracing.sites import dtype_name
from ampscope.capture.usage.followed_values import FollowedValues
from ampscope.capture.usage.mistake import Mistake
from ampscope.capture.usage.scale_dependence import FREE
from ampscope.trace.evidence import FindingEvidence
from ampscope.trace.vocabulary import Cause, MistakeForm

#: Nodes of loss code looked at between a loss and the scaling that it may come from.
_MOST_NODES = 500

ScalerNumbers = frozenset[int | None]  #: numbers of scalers; None for a loss that no scaler scaled

UNSCALED: ScalerNumbers = frozenset({None})


class ScaledLosses:
    """Knows which scaler has scaled the loss that a backward starts from."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._by_number: dict[int, int] = {}  # of the autograd node that multiplied by the scale -> scaler
        self._waiting: set[int] = set()  # the nodes of which no gradients were asked since

    def scaled(self, scaler: int, outputs: Iterable[Tensor]) -> None:
        """A scaler returned these outputs."""
        for tensor in outputs:
            if tensor.grad_fn is not None:
                number = node_sequence_number(tensor.grad_fn)
                self._by_number[number] = scaler
                self._waiting.add(number)

    def clear(self) -> None:
        """A step is over."""
        self._by_number.clear()
        self._waiting.clear()

    def has_scaled(self, scaler: int, losses: Iterable[Tensor]) -> bool:
        """Whether ``losses`` come from one that this scaler has scaled, and that is no further than that.

        After a backward a loss may be made of gradients, whose scale was divided out.
        """
        return bool(self._waiting) and scaler in self._leading_to(losses, self._waiting)

    def scalers_of(self, roots: Iterable[Tensor]) -> ScalerNumbers:
        """The scalers whose scaling leads to ``roots``, which a backward begins from; `UNSCALED` without any."""
        self._waiting.clear()
        return frozenset(self._leading_to(roots, self._by_number)) or UNSCALED

    def reached_unscaled(self, roots: Iterable[Tensor]) -> int | None:
        """A parameter (its ``id``) that a backward from ``roots`` reaches past every scaling, for sure."""
        front = [root.grad_fn for root in roots if root.grad_fn is not None]
        seen = set(front)
        while front and len(seen) < _MOST_NODES:
            node = front.pop()
            key = id(getattr(node, "variable", None))  # only the nodes that accumulate gradients have one
            if key in self._models.parameters:
                return key
            if node_sequence_number(node) not in self._by_number and not _may_scale(node):
                new = {each for each, _ in node.next_functions if each is not None} - seen
                seen |= new
                front += new
        return None

    def _leading_to(self, tensors: Iterable[Tensor], scalings: Collection[int]) -> set[int]:
        """The scalers whose ``scalings`` lead to ``tensors``.

        A node's number is larger than those of the nodes it leads to, so only what the loop did after scaling is
        walked.
        """
        found: set[int] = set()
        if not scalings:
            return found
        earliest = min(scalings)
        front = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        visited: set[int] = set()
        while front and len(visited) < _MOST_NODES:
            node = front.pop()
            number = node_sequence_number(node)
            if number in scalings:
                found.add(self._by_number[number])
            elif number >= earliest and number not in visited:
                visited.add(number)
                front += [each for each, _ in node.next_functions if each is not None and each.next_functions]
        return found


def _may_scale(node: Any) -> bool:
    """Whether a node may multiply gradients by the scale, or by zero: by anything but a number that can be seen."""
    if isinstance(node, BackwardCFunction):  # a function of the user's
        return True
    if not node.name().startswith("MulBackward") or all(each is not None for each, _ in node.next_functions):
        return False
    return not factor_of(node)


#: A loop may make up to as many steps in a row without effect on purpose, less one: it leaves out a bad batch. Where
#: others had an effect, up to as many as those: what is no line of every round is a decision.
_ON_PURPOSE = 3


class GradientScales:
    """The scalers whose scales are in the gradients now."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._by_parameter: dict[int | None, ScalerNumbers] = {}  # by id; None: every one that is not listed
        self._unscaled: dict[int, weakref.ref[Tensor]] = {}  # gradients divided by ``unscale_``, by id of the parameter
        self._within_step: list[Tensor] = []  # parameters whose gradients ``scaler.step`` has divided, and uses at once
        self._before: dict[int, tuple[Tensor, int]] | None = None
        self._in_backward = UNSCALED
        self._also_unscaled: int | None = None
        self._at_risk: set[int] = set()
        #: A parameter that had a gradient when the latest backward was over.
        self._witness: Callable[[], Tensor | None] = _nothing
        self._is_used = False  # an optimizer has stepped since
        self._emptied: set[int] = set()  # what was set to zero since, by ``id``
        self._in_vain = 0  # steps in a row that had gradients of zero, for that reason
        self._with_effect = 0  # steps with gradients that nobody had set to zero
        self._is_refilled = False  # the loop writes into what it has set to zero

    def before_backward(self, scalers: ScalerNumbers, *, several: bool, unscaled: int | None = None) -> None:
        """A backward begins.

        Args:
            scalers: Which scaled its loss.
            several: Whether to tell apart which parameters it reaches: there may be several optimizers.
            unscaled: A parameter (by ``id``) that it reaches from a loss that none of them scaled, too.
        """
        if self._within_step:
            self._settle()
        usual = self._by_parameter.get(None, scalers)
        self._in_backward, self._also_unscaled = scalers, unscaled
        if several or usual != scalers or self._unscaled or len(self._by_parameter) > 1:
            self._before = self._versions()
            self._forget_cleared(scalers)

    def after_backward(self) -> bool:
        """A backward is over; returns whether it added to gradients that were unscaled already."""
        added = self._after_backward()
        if self._also_unscaled is not None:
            self._by_parameter[self._also_unscaled] = self._of_parameter(self._also_unscaled) | UNSCALED
        return added

    def _after_backward(self) -> bool:
        self._is_used = False
        self._emptied.clear()
        witness = self._witness()
        if witness is None or witness.grad is None:
            witness = next((p for _, p in self._models.parameters.values() if p.grad is not None), None)
            self._witness = weakref.ref(witness) if witness is not None else _nothing
        before, self._before = self._before, None
        if before is None:
            self._by_parameter[None] = self._in_backward | self._by_parameter.get(None, frozenset())
            return False
        now = self._versions()
        reached = [key for key, stamp in now.items() if key not in before or _stamp(before[key]) != _stamp(stamp)]
        for key in reached:
            added_to = key in before and before[key][0] is now[key][0]
            self._by_parameter[key] = self._in_backward | (self._of_parameter(key) if added_to else frozenset())
        return any(key in self._at_risk for key in reached)

    def were_unscaled(self, parameters: list[Tensor], *, by_loop: bool) -> None:
        """``unscale_`` has divided the gradients of ``parameters``: called by the loop, or by a step that uses them."""
        if self._within_step:
            self._settle()
        self._within_step = parameters
        if by_loop:
            self._settle()

    def _settle(self) -> None:
        """Takes down one by one which gradients are unscaled: a step that ends as it should needs none of it."""
        self._unscaled |= {id(p): weakref.ref(p.grad) for p in self._within_step if p.grad is not None}
        self._within_step = []

    def stepped(self, parameters: list[Tensor]) -> None:
        """An optimizer has used the gradients of ``parameters``, or was skipped."""
        self._is_used = True
        if len(parameters) == len(self._within_step) and all(map(is_, parameters, self._within_step)):
            self._within_step = []
        if self._within_step:
            self._settle()
        self._by_parameter.pop(None, None)
        if self._by_parameter or self._unscaled:
            for key in map(id, parameters):
                self._by_parameter.pop(key, None)
                self._unscaled.pop(key, None)

    def function_ran(self, func: Callable[..., Any], args: Any) -> None:
        """A torch function ran after a backward: what it has set to zero is noted."""
        if getattr(func, "__name__", "") in EMPTYING:
            self._emptied |= set(map(id, tensor_tree.tensors(args)))

    def cleared(self, optimizer: Optimizer) -> Mistake | None:
        """An optimizer is about to step, and the gradients that a backward left for it are gone, or all set to zero."""
        witness = self._witness()
        if self._is_used or witness is None:
            return None
        if witness.grad is not None and not self._emptied:
            self._in_vain, self._with_effect = 0, self._with_effect + 1
            return None
        parameters = OptimizerView(optimizer).parameters
        left = [p.grad for p in parameters if p.grad is not None]
        if all(p is not witness for p in parameters) or not set(map(id, left)) <= self._emptied:
            return None
        self._in_vain += 1
        if left and (self._is_refilled or self._in_vain < max(_ON_PURPOSE, self._with_effect)):
            return None
        self._is_refilled = not all(_all_zero([each for each in left if each.layout is torch.strided]))
        return None if self._is_refilled else Mistake(Cause.MISUSE_GRADIENTS_CLEARED, user_place())

    def free_of_scale(self) -> Iterator[Tensor]:
        """The gradients that no scaler has scaled, or that ``unscale_`` has divided."""
        if self._within_step:
            self._settle()
        usual = self._by_parameter.get(None, frozenset())
        for key, (_, parameter) in self._models.parameters.items():
            is_free = key in self._unscaled or not self._by_parameter.get(key, usual) - UNSCALED
            if is_free and (gradient := parameter.grad) is not None:
                yield gradient

    def gradients(self) -> Iterator[Tensor]:
        """All that there are."""
        return (p.grad for _, p in self._models.parameters.values() if p.grad is not None)

    def scalers_of(self, parameters: Iterable[Tensor]) -> ScalerNumbers:
        """The scalers whose scale is in the gradients of ``parameters``; empty where no backward was seen."""
        if len(self._by_parameter) == 1 and None in self._by_parameter:  # the same of all
            for parameter in parameters:
                if parameter.grad is not None:
                    return self._by_parameter[None]
            return frozenset()
        return frozenset().union(*(self._of_parameter(id(p)) for p in parameters if p.grad is not None))

    def _of_parameter(self, key: int) -> ScalerNumbers:
        """Returns the numbers of the scalers by which the gradient of the parameter with this ``id`` was scaled."""
        return self._by_parameter.get(key, self._by_parameter.get(None, frozenset()))

    def is_unscaled(self, parameters: Iterable[Tensor]) -> bool:
        """Whether ``unscale_`` has divided the gradients of any of ``parameters``."""
        if self._within_step:
            self._settle()
        return bool(self._unscaled) and any(id(p) in self._unscaled for p in parameters)

    def hold_scale(self, parameters: Iterable[Tensor]) -> bool:
        """Whether a scaler's scale is still in the gradients of ``parameters``."""
        parameters = list(parameters)
        return bool(self.scalers_of(parameters) - UNSCALED) and not self.is_unscaled(parameters)

    def _versions(self) -> dict[int, tuple[Tensor, int]]:
        """Each parameter's gradient and its version, by id of the parameter."""
        found = self._models.parameters.values()
        return {id(p): (p.grad, p.grad._version) for _, p in found if p.grad is not None}

    def _forget_cleared(self, scalers: ScalerNumbers) -> None:
        """Gradients that were cleared since hold no scale.

        Looks at values, but only of gradients that another scaler has scaled or that are unscaled already.
        """
        before = {key: gradient for key, (gradient, _) in (self._before or {}).items()}
        unscaled = {key for key, ref in self._unscaled.items() if ref() is before.get(key, self)}
        others = {key for key in before if self._of_parameter(key) not in (scalers, frozenset())}
        doubtful = sorted(unscaled | others)
        cleared = {key for key, zero in zip(doubtful, _all_zero([before[k] for k in doubtful]), strict=True) if zero}
        self._by_parameter |= dict.fromkeys(cleared, frozenset())
        self._at_risk = unscaled - cleared
        self._unscaled = {key: self._unscaled[key] for key in self._at_risk}


class PartlyUnscaled:
    """Whether some gradients of a step hold the scale still while others hold it no more: each optimizer has its own.

    Args:
        scales: Which gradients a scaler has divided.
        values: Learns which gradients hold no scale.
        several: There may be several optimizers.
    """

    def __init__(self, scales: GradientScales, values: FollowedValues, *, several: bool) -> None:
        self._scales = scales
        self._values = values
        self._several = several
        self._is_so: bool | None = False  # None: not looked at since gradients were unscaled

    def unscaled(self, scaled: bool) -> None:
        """``unscale_`` has run; ``scaled`` gradients were there."""
        self._is_so = None if scaled and (self._several or self._values.holds_scaled) else False

    def is_so(self) -> bool:
        """Whether it is; looks when the loop does something to gradients after some were unscaled."""
        if self._is_so is None:
            self._values.find_gradients()
            for gradient in self._scales.free_of_scale():
                if gradient.layout is torch.strided:
                    self._values.gradient_written(gradient, FREE)
            self._is_so = any(self._values.dependence_of(each).degree for each in self._scales.gradients())
            if not self._is_so:
                self._values.gradients_unscaled()
        return self._is_so


class HalfGradients:
    """Recognises gradients that are float16 themselves, since their parameters are: no scaler unscales those.

    It also follows whether the loop casts what it trains to half precision, and back.
    """

    def __init__(self) -> None:
        self._found: dict[int, bool] = {}  # whether there were any, by ``id`` of the optimizer
        self._narrowed: WeightsCast | None = None  # since the parameters are in half precision
        self._has_trained = False  # a step of this process has ended
        self._restored: WeightsCast | None = None  # by which they were, though they are no more; no step came since

    def cast(self, cast: WeightsCast) -> None:
        """The loop has cast what it trains."""
        if cast.dtype in HALF:
            self._narrowed = cast
        elif self._narrowed is not None:
            self._narrowed, self._restored = None, self._narrowed if self._has_trained else None

    def rounded(self) -> Mistake | None:
        """The mistake of a step that goes on with weights which have been in half precision since the step before.

        The weights that a run begins with may come from there: nothing that was trained is lost.
        """
        self._has_trained, cast, self._restored = True, self._restored, None
        if cast is None:
            return None
        found = FindingEvidence(half=cast.changed, of=cast.of, dtype=dtype_name(cast.dtype))
        return Mistake(Cause.HALF_PARAMS, cast.place, max(cast.step - 1, 0), MistakeForm.CAST_AND_BACK, found)

    def check(self, optimizer: Optimizer, *, refused: bool = False) -> Mistake | None:
        """The mistake; the gradients of each optimizer are looked at once, and when a scaler has ``refused`` them."""
        before = self._found.get(id(optimizer))
        if before or (before is not None and not refused):
            return None
        held = [p for p in OptimizerView(optimizer).parameters if p.grad is not None]
        half = [p for p in held if p.grad is not None and p.grad.dtype is torch.float16]
        self._found[id(optimizer)] = bool(half)
        found = FindingEvidence(half=len(half), of=len(held), cast=before is not None)
        place = self._narrowed.place if self._narrowed is not None else user_place()
        return Mistake(Cause.HALF_PARAMS, place, evidence=found) if half else None


def _nothing() -> None:
    """In the place of a reference."""


def _all_zero(gradients: list[Tensor]) -> list[bool]:
    """Whether each gradient is zero throughout; the device is waited for once."""
    if not gradients:
        return []
    shards = [local(gradient).detach() for gradient in gradients]
    norms = [shard.abs().max() if shard.numel() else shard.new_zeros(()) for shard in shards]
    return [value == 0 for value in torch.stack([norm.float().to(norms[0].device) for norm in norms]).tolist()]


def _stamp(entry: tuple[Tensor, int]) -> tuple[int, int]:
    return id(entry[0]), entry[1]
