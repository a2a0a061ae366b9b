"""Describes the program point of an op that runs now: where and under what it runs, and with what."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.user_line import NOWHERE
from ampscope.capture.tracing import operators
from ampscope.capture.tracing.casts import cast_reason
from ampscope.capture.tracing.operators import Operator
from ampscope.capture.tracing.program.function_watch import FunctionWatch
from ampscope.capture.tracing.program.module_stack import ModuleStack
from ampscope.capture.tracing.program.places import Places
from ampscope.capture.tracing.sites import Circumstances, Point, Signature, Sites
from ampscope.capture.tracing.statistics.tensor_values import stored
from ampscope.trace.schema import Cast, Node, Phase


class OpPoints:
    """Describes the points of one step.

    Args:
        sites: The numbered program points.
        places: Finds the user's line.
        functions: Knows the torch function that is called.
        modules: Knows the module that is running.
    """

    def __init__(self, sites: Sites, places: Places, functions: FunctionWatch, modules: ModuleStack) -> None:
        self.phase: Phase | None = None  #: set for a part of the step that cannot be told from what runs
        self.sites = sites
        self._places = places
        self._functions = functions
        self._modules = modules

    def now(self, operator: Operator) -> Circumstances:
        """Where and under what an op runs that has just run."""
        node = torch_private.current_backward_node()
        phase = self._phase(node)
        functions, module = self._functions, self._modules.innermost
        if phase is not Phase.BACKWARD:
            outside = functions.place if node is None and not functions.unwraps else None
            place = outside or self._places.now()
            return Circumstances(operator, phase, module, place, functions.function, functions.region)
        grad_fn, forward_site, place = "", None, NOWHERE
        if node is not None:
            grad_fn, forward_site = node.name(), self._places.forward_site(node)
        if forward_site is not None:
            forward = self.sites.point(forward_site)
            module, place = forward.module, forward.place
        place = self._places.inside_backward() or place
        return Circumstances(
            operator, phase, module, place, functions.function, functions.region, grad_fn, forward_site
        )

    def of_op(self, now: Circumstances, args: Any, kwargs: Any, operands: list[Tensor], results: list[Tensor]) -> Point:
        """The point of an op that has just run."""
        cast = Cast.NONE
        if now.operator.is_cast and operands:
            reason = self.sites.point(now.forward_site).cast if now.forward_site is not None else Cast.NONE
            ends = (operands[0].dtype, results[0].dtype)
            cast = cast_reason(*ends, forward=reason, function=now.function, autocast=now.autocast)
        return Point(
            op=now.operator.name,
            module=now.module or "",
            phase=now.phase,
            place=now.place,
            inputs=signature(operands),
            outputs=signature(results),
            scalars=operators.scalar_arguments(now.operator, args, kwargs),
            autocast=now.autocast,
            cast=cast,
            grad_fn=now.grad_fn,
            forward_site=now.forward_site,
        )

    def site(self, now: Circumstances, args: Any, kwargs: Any, operands: list[Tensor], results: list[Tensor]) -> int:
        """The number of the site of an op that has just run."""
        known = self.sites.repeats.site(now, args, kwargs, operands, results)
        if known is None:
            known = self.sites.number(self.of_op(now, args, kwargs, operands, results))
            self.sites.repeats.ran(now, args, kwargs, operands, results, site=known)
        return known

    def of_view(self, operator: Operator) -> Point:
        """The point of an op that computes nothing, but whose gradient may be computed: a sum for what was expanded."""
        functions = self._functions
        phase = self._phase(torch_private.current_backward_node())
        place = self._places.now() if functions.place is None else functions.place
        return Point(operator.name, self._modules.innermost or "", phase, place, autocast=functions.region)

    def link(self, phase: str, site: int) -> None:
        """The autograd node that was made last belongs to the op at a site, which ran in ``phase``."""
        if self.records_graph(phase):
            self._places.link(site)

    def records_graph(self, phase: str) -> bool:
        """Whether an autograd node that was made in a phase is one whose gradient belongs to the op that made it."""
        if phase == Phase.BACKWARD:
            return torch.is_grad_enabled()
        return phase != Phase.OPTIMIZER

    def ran(self, operator: Operator, operands: list[Any], result: Any) -> None:
        """Follows what an op gave to those that read it."""
        self._places.ran(operator, operands, result, creates_graph=self._functions.creates_graph)

    def of_entry(self, node: Node, name: str, tensor: Tensor) -> Point:
        """The point of a value from outside the step, which is read now for the first time."""
        phase = self._phase(torch_private.current_backward_node())
        return Point(node, self._modules.innermost or "", phase, outputs=signature([tensor]), name=name)

    def _phase(self, node: Any) -> Phase:
        """In which part of the step an op runs; ``node`` is the autograd node that is being evaluated, if any."""
        if self.phase is not None:
            return self.phase
        if node is not None:
            recomputing = torch.is_grad_enabled() and not self._functions.creates_graph
            return Phase.RECOMPUTE if recomputing and not self._is_of_function(node) else Phase.BACKWARD
        return Phase.FORWARD if self._modules.innermost is not None else Phase.LOSS

    def _is_of_function(self, node: Any) -> bool:
        """Whether what runs is a function's own ``backward``, which may record a graph to take a gradient within it.

        Not where a module runs inside, or a checkpoint's function: those compute a forward pass again.
        """
        own = isinstance(node, torch.autograd.function.BackwardCFunction)
        return own and self._modules.innermost is None and not isinstance(node, CheckpointFunction._backward_cls)


def of_sink(node: Node, name: str, module: str, tensor: Tensor) -> Point:
    """The point of a value that matters at the end of the step: a loss, a gradient, what the step left behind."""
    inputs = signature([tensor])
    return Point(node, module, inputs=inputs, outputs=inputs, name=name)


def signature(tensors: list[Tensor]) -> Signature:
    """Dtypes and shapes of tensors; of a nested one, which need not have a shape, that of all that it holds."""
    shapes = tuple([stored(t).shape if t.is_nested else t.shape for t in tensors])
    return Signature(tuple([t.dtype for t in tensors]), shapes)
