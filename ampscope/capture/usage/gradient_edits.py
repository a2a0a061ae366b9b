"""Judges what a loop does to gradients that hold the loss scale: right is what would be the same without it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.function_names import is_in_place
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.torch_support.user_line import Place, user_place
from ampscope.capture.usage import scale_dependence
from ampscope.capture.usage.followed_values import FollowedValues
from ampscope.capture.usage.loop_numbers import ClipFactors, ScaledTerms, is_round
from ampscope.capture.usage.mistake import Mistake
from ampscope.capture.usage.scale_dependence import CONSTANT, SCALED, ScaleDependence
from ampscope.trace.evidence import FindingEvidence
from ampscope.trace.vocabulary import Cause, MistakeForm

_KEPT = (Cause.MISUSE_NO_UNSCALE, MistakeForm.KEPT_OF_SCALED)
_READS = frozenset({"item", "__float__", "__bool__"})
#: Functions that write one of their arguments, by its position.
_COPIES = {"copy": 1, "set": 1, "setitem": 2}


class GradientEdits:
    """The loop's own work on gradients between backward and optimizer.

    Args:
        values: How the loop's values depend on the scale; what it computes is added here.
        step: Gives the number of the present step.
    """

    def __init__(self, values: FollowedValues, step: Callable[[], int]) -> None:
        self._values = values
        self._step = step
        self._clip_factors = ClipFactors()
        self._terms = ScaledTerms(values.scales)
        self._decision: Mistake | None = None
        self._mistake: Mistake | None = None
        self._numbers: dict[float, Mistake] = {}  # that Python has got: what each is as a learning rate
        self._is_unscaled = False  # the gradients are, as the function runs that is looked at
        self.are_judged = True  #: nothing was done to gradients since `take`
        self.unscaled_at: Place | None = None  #: where the loop last divided the scale out by itself

    def scaled_anew(self, result: Any) -> None:
        """``torch.autograd.grad`` of a scaled loss returned ``result``."""
        for tensor in tensor_tree.tensors(result):
            self._values.follow(tensor, SCALED)

    def new_iteration(self) -> None:
        """A forward begins after a step: what was computed from the old gradients is history."""
        self._values.new_iteration()
        self._clip_factors.forget_reads()
        self._terms.clear()
        self._mistake = self._decision = None
        if self._numbers:
            self._numbers.clear()

    def take(self) -> Mistake | None:
        """The first mistake since the last call; a decision counts when no edit is one."""
        found = self._mistake or self._decision
        self._mistake = self._decision = None
        self.are_judged = True
        return found

    def rate_of(self, optimizer: Optimizer) -> Mistake | None:
        """The mistake of a step with a learning rate that depends on the scale."""
        for rate in (group.get("lr") for group in OptimizerView(optimizer).groups):
            how = self._values.dependence_of(rate) if isinstance(rate, Tensor) else CONSTANT
            if how.inhomogeneous or (how.degree and not how.of_scale):
                return self.of_kept(Mistake.here(*_KEPT), (rate,))
            if isinstance(rate, float) and rate > 0 and not is_round(rate) and rate in self._numbers:
                return self._numbers[rate]  # a round one, like 1.0, is read of much else
        return None

    def of_kept(self, mistake: Mistake, values: Iterable[object]) -> Mistake:
        """The mistake, with the line whose value an earlier iteration has kept if ``values`` are made of it."""
        kept = self._values.kept_among(values)
        if kept is None or kept.place is None:
            return mistake
        line = f"{PurePath(kept.place.file).name}:{kept.place.line}"
        return mistake._replace(evidence=FindingEvidence(kept_by=line))

    # -- what torch ran -----------------------------------------------------------------------------------------

    def function_ran(
        self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any, *, unscaled: bool = False
    ) -> None:
        """A torch function ran outside the models, some of whose arguments may depend on the scale.

        Args:
            func: The function.
            args: Its arguments.
            kwargs: Those that were given by name.
            result: What it returned.
            unscaled: All gradients are unscaled; something else may not be.
        """
        self._is_unscaled = unscaled
        name = scale_dependence.plain_name(func)
        self.are_judged = False
        if getattr(func, "__name__", "") in _READS:
            self._number_read(name, args, result)
        elif name == "get":
            self._attribute_read(args, result)
        elif is_in_place(func, kwargs) and name not in ("register_hook", "retain_grad"):
            self._written(func, name, args, kwargs)
        else:
            for tensor, given in _one_by_one(func, args, list(tensor_tree.tensors(result))):
                dependence = self._of_result(name, given, kwargs)
                if name == "detach" and isinstance(given[0], Tensor):
                    self._values.lies_in(tensor, given[0])
                if dependence != CONSTANT and not self._values.is_in_gradient(tensor):
                    self._values.follow(tensor, dependence, (*given, *kwargs.values()))
                elif scale_dependence.multiplies(name):
                    self._terms.multiplied(tensor, given)

    def _of_result(self, name: str, args: Any, kwargs: Any) -> ScaleDependence:
        """How a function's result depends on the scale; terms that may have been multiplied by it were if that fits."""
        values = self._values
        of_operand = values.dependence_of_threshold if scale_dependence.bounds(name) else values.dependence_of_operand
        found = scale_dependence.of_result(name, args, kwargs, of_operand)
        if found.inhomogeneous and scale_dependence.adds(name):
            found = scale_dependence.of_result(name, args, kwargs, self._of_term)
        if found.inhomogeneous and scale_dependence.adds(name):  # zero is a multiple of every power
            terms = [0.0 if values.dependence_of(each) == CONSTANT and values.is_zero(each) else each for each in args]
            return scale_dependence.of_result(name, terms, kwargs, of_operand)
        return found

    def _of_written(
        self, tensor: Tensor, name: str, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> ScaleDependence:
        """How what was written depends on the scale: what only sums scaled values up does as those do.

        What it began with is gone. If that was no zero, the sum is no constant either.
        """
        values, own = self._values, bool(args) and args[0] is tensor
        if own and scale_dependence.adds(name) and values.dependence_of(tensor) == CONSTANT:
            args = (args[1] if name == "lerp" else 0.0, *args[1:])
        return self._of_result(name, args, kwargs)

    def _of_term(self, value: Any) -> ScaleDependence:
        found = self._values.dependence_of(value)
        return SCALED if found == CONSTANT and value in self._terms else found

    def _attribute_read(self, args: Any, result: Any) -> None:
        """An attribute was read: a view of a gradient needs no note, one of another tensor depends as that does."""
        if isinstance(result, Tensor) and args and not self._values.is_in_gradient(result):
            dependence = self._values.dependence_of(args[0])
            if dependence != CONSTANT and not isinstance(args[0], torch.nn.Parameter):
                self._values.follow(result, dependence, args)
            self._values.lies_in(result, args[0])

    def _number_read(self, name: str, args: Any, result: Any) -> None:
        """A number, or a decision, was taken out of a tensor."""
        dependence = self._values.dependence_of(args[0])
        if dependence.of_scale and name != "bool":
            self._values.scale_read(float(result))
        elif name == "bool":
            if dependence.inhomogeneous and self._decision is None:
                form = MistakeForm.KEPT_OF_SCALED if self._is_unscaled else MistakeForm.DECISION_ON_SCALED
                self._decision = self.of_kept(Mistake.here(Cause.MISUSE_NO_UNSCALE, form), args)
        elif dependence.degree or dependence.inhomogeneous:
            self._numbers.setdefault(float(result), self.of_kept(Mistake.here(*_KEPT), args))
            self._clip_factors.number_read(float(result))

    def _written(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> None:
        """Something was overwritten; gradients are looked at more closely."""
        written = kwargs.get("out")
        if written is None and args:
            written = args[0]
        source = args[_COPIES[name]] if name in _COPIES and len(args) > _COPIES[name] else None
        dependence = self._values.dependence_of(source) if source is not None else CONSTANT
        if dependence == CONSTANT and name in (*_COPIES, "fill"):
            in_part = name == "setitem"
            if isinstance(written, Tensor) and not (in_part and isinstance(source, (int, float)) and not source):
                self._values.constant_written(written, in_part=in_part)
            return
        if isinstance(source, Tensor) and self._becomes_gradient(func, args[0]):
            written = source
            self._values.gradient_assigned(source)
        for tensor, given in _one_by_one(func, args, list(tensor_tree.tensors(written))):
            if name not in _COPIES:
                dependence = self._of_written(tensor, name, given, kwargs)
            self._overwritten(tensor, name, given, dependence)

    def _becomes_gradient(self, func: Callable[..., Any], target: Any) -> bool:
        """Whether an assignment gives a parameter another gradient, or a gradient another memory."""
        attribute = getattr(func, "__self__", None)
        return attribute is torch.Tensor.grad or (
            attribute is torch.Tensor.data and self._values.is_gradient_object(target)
        )

    def _overwritten(self, tensor: Tensor, name: str, args: Any, dependence: ScaleDependence) -> None:
        if not self._values.is_in_gradient(tensor):
            if dependence != CONSTANT:
                self._values.follow(tensor, dependence, args)
            return
        if dependence.unknown:
            return
        if dependence == CONSTANT and self._values.dependence_of(tensor).unscaled:
            return
        if self._mistake is None and (found := self._mistake_of(name, args, dependence)) is not None:
            self._mistake = self.of_kept(found, args)
        if dependence.unscaled:
            self.unscaled_at = user_place()
        self._values.gradient_written(tensor, dependence)

    def _mistake_of(self, name: str, args: Any, dependence: ScaleDependence) -> Mistake | None:
        """Returns the mistake in an edit of a gradient; None for one that would be the same without the loss scale."""
        if self._is_unscaled:
            depends = dependence.inhomogeneous or dependence.degree
            return Mistake.here(*_KEPT) if depends else None
        if dependence.inhomogeneous or (dependence.degree != 1 and not dependence.unscaled):
            return Mistake(dependence.inhomogeneous or Cause.MISUSE_CLIP_BEFORE_UNSCALE, user_place())
        if name in ("mul", "div", "imul", "idiv") and len(args) > 1:
            since = self._clip_factors.inconsistent_since(name, args[1], self._values.scales, self._step())
            if since is not None:
                return Mistake(Cause.MISUSE_CLIP_BEFORE_UNSCALE, user_place(), since)
        return None


def _one_by_one(
    func: Callable[..., Any], args: tuple[Any, ...], tensors: list[Tensor]
) -> Iterator[tuple[Tensor, tuple[Any, ...]]]:
    """Each tensor that a function returns or writes, with the arguments it comes from: of ``_foreach_*``, its own."""
    several = getattr(func, "__name__", "").startswith("_foreach_")
    for number, tensor in enumerate(tensors):
        own = [each[number] if isinstance(each, (list, tuple)) and len(each) == len(tensors) else each for each in args]
        yield tensor, tuple(own) if several else args
