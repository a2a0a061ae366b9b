"""`OpPoints` describes the program point of an op that runs now: where and under what, with what, and why it casts."""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.user_line import NOWHERE
from ampscope.capture.tracing import operators
from ampscope.capture.tracing.executions import Call, Circumstances, Made, Ran
from ampscope.capture.tracing.light_statistics import stored
from ampscope.capture.tracing.operators import Operator
from ampscope.capture.tracing.places import Places
from ampscope.capture.tracing.running_code import FunctionWatch, ModuleStack
from ampscope.capture.tracing.sites import Signature, SiteKey, Sites
from ampscope.trace.schema import Cast, Node, Phase

#: Python-level functions by which a user asks for another dtype.
_CONVERSIONS = frozenset(
    {"to", "type", "type_as", "half", "float", "double", "bfloat16", "astype", "to_dense", "as_tensor", "tensor"}
)


def cast_reason(
    before: torch.dtype, after: torch.dtype, *, forward: Cast, function: str, autocast: torch.dtype | None
) -> Cast:
    """Why a tensor was cast.

    Args:
        before: Its dtype.
        after: That of the result.
        forward: In backward, why the forward op was a cast: its gradient is cast back for the same reason.
        function: Name of the torch function that the user called.
        autocast: The dtype of the enclosing autocast region; None outside.
    """
    if before == after:
        return Cast.NONE
    if forward:
        return forward
    if function in _CONVERSIONS:
        return Cast.EXPLICIT
    return Cast.AUTOCAST if autocast in (before, after) else Cast.PROMOTION


#: Of an op: the autograd node that is being evaluated, and the frame that called the op; None outside of backward.
Within = tuple[Any, FrameType | None]


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
        self._engine = torch_private.runs_engine()

    def now(self, node: Any, caller: FrameType | None) -> Circumstances:
        """Returns the circumstances (phase, module, line, function, autocast region) of the op that has just run.

        Args:
            node: The autograd node that is being evaluated; None outside of backward.
            caller: The frame that the op was called from; None on a thread that runs no Python.
        """
        functions, module = self._functions, self._modules.innermost
        if node is not None and self.phase is None and not torch.is_grad_enabled():  # so are most ops of a backward
            return self._backward(node, caller)
        if node is None and self.phase is None:
            known = functions.met
            if known is not None and known.module == module and not functions.unwraps:
                return known
            phase = Phase.FORWARD if module is not None else Phase.LOSS
        else:
            phase = self._phase(node)
            if phase is Phase.BACKWARD:
                return self._backward(node, caller)
        outside = functions.place if node is None and not functions.unwraps else None
        place = outside or self._places.now()
        function, region = functions.function, functions.region
        known = self.sites.met.of(place, phase=phase, module=module, function=function, autocast=region)
        if outside is not None and self.phase is None:
            functions.met = known
        return known

    def _backward(self, node: Any, caller: FrameType | None) -> Circumstances:
        """The circumstances of an op that computes a gradient."""
        functions, places = self._functions, self._places
        # called by the engine itself, which `torch.autograd` runs, and by no code of the user's
        begun = caller.f_back if node is not None and caller is not None and caller.f_code is self._engine else None
        plain = begun is not None and id(begun.f_code) in places.ends and places.makes_all()
        module, grad_fn, forward_site, place = self._modules.innermost, "", None, NOWHERE
        if plain:
            grad_fn, forward_site = node.name(), places.forward.sites.get(torch_private.node_sequence_number(node))
            evaluation = (forward_site, grad_fn, functions.function, functions.region)
            known = self.sites.met.evaluations.get(evaluation)
            if known is not None:
                return known
        elif node is not None:
            grad_fn, forward_site = node.name(), places.forward_site(node)
        if forward_site is not None:
            forward = self.sites.point(forward_site)
            module, place = forward.module, forward.place
        if not plain:
            place = places.inside_backward() or place
        found = self.sites.met.of(
            place,
            phase=Phase.BACKWARD,
            module=module,
            function=functions.function,
            autocast=functions.region,
            grad_fn=grad_fn,
            forward_site=forward_site,
        )
        if plain and forward_site is not None:
            self.sites.met.evaluations[evaluation] = found
        return found

    def ran(
        self, operator: Operator, now: Circumstances, call: Call, results: list[Tensor], written: list[Tensor]
    ) -> Ran:
        """Describes an op that has just run, where that is not remembered.

        Args:
            operator: The op.
            now: Where and under what it ran.
            call: Its arguments.
            results: The tensors that it gave.
            written: Those of its arguments that it overwrote.
        """
        operands = operators.operands(operator, *call)
        overwritten = operators.among(operands, written)
        site = self.sites.number(self.of_op(operator, now, call, operands, results))
        edges = tuple([(arg, arg in overwritten) for arg in range(len(operands))])
        held = [stored(each) for each in results]
        made = Made(site, tuple([each.numel() for each in held]), edges)
        now.ran(operator.name, call, results, overwritten, made)
        return made, [stored(each) for each in operands], held, overwritten

    def of_op(
        self, operator: Operator, now: Circumstances, call: Call, operands: list[Tensor], results: list[Tensor]
    ) -> SiteKey:
        """The point of an op that has just run."""
        cast = Cast.NONE
        if operator.is_cast and operands:
            reason = self.sites.point(now.forward_site).cast if now.forward_site is not None else Cast.NONE
            ends = (operands[0].dtype, results[0].dtype)
            cast = cast_reason(*ends, forward=reason, function=now.function, autocast=now.autocast)
        return SiteKey(
            op=operator.name,
            module=now.module or "",
            phase=now.phase,
            place=now.place,
            inputs=signature(operands),
            outputs=signature(results),
            scalars=operators.scalar_arguments(operator, *call),
            autocast=now.autocast,
            cast=cast,
            grad_fn=now.grad_fn,
            forward_site=now.forward_site,
        )

    def link_view(self, operator: Operator, node: Any, caller: FrameType | None) -> None:
        """The node that was made last is that of an op that computes nothing.

        Its gradient may be computed: a sum for what was expanded.
        """
        functions, now = self._functions, None
        if node is None and self.phase is None and not functions.unwraps:
            now = self.now(node, caller)
            phase, place, known = now.phase, now.place, now.views.get(operator.name)
        else:
            phase, known = self._phase(node), None
            place = self._places.now() if functions.place is None else functions.place
        if known is None:
            point = SiteKey(operator.name, self._modules.innermost or "", phase, place, autocast=functions.region)
            known = self.sites.number(point)
            if now is not None:
                now.views[operator.name] = known
        self.link(phase, known)

    def link(self, phase: Phase, site: int) -> None:
        """The autograd nodes that were made last belong to the op at a site, which ran in ``phase``.

        There is one for each transform that it runs in.
        """
        if phase is Phase.BACKWARD and not torch.is_grad_enabled():
            return  # none whose gradient belongs to the op that made it
        if phase is not Phase.OPTIMIZER:
            nodes = self._places.makes
            for number in nodes.made:
                nodes.sites[number] = site

    def follow(self, operator: Operator, operands: list[Any], result: Any) -> None:
        """Follows what an op gave to those that read it."""
        self._places.ran(operator, operands, result, creates_graph=self._functions.creates_graph)

    def number_entry(self, node: Node, name: str, tensor: Tensor) -> int:
        """The number of the site of a value from outside the step, which is read now for the first time."""
        module, phase = self._modules.innermost or "", self._phase(torch_private.current_backward_node())
        key = (node, name, module, phase, tensor.dtype, _shape(tensor))
        known = self.sites.entries.get(key)
        if known is None:
            point = SiteKey(node, module, phase, outputs=signature([tensor]), name=name)
            known = self.sites.entries[key] = self.sites.number(point)
        return known

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


def of_sink(node: Node, name: str, module: str, tensor: Tensor) -> SiteKey:
    """The point of a value that matters at the end of the step: a loss, a gradient, what the step left behind."""
    inputs = signature([tensor])
    return SiteKey(node, module, inputs=inputs, outputs=inputs, name=name)


def signature(tensors: list[Tensor]) -> Signature:
    """Dtypes and shapes of tensors."""
    return Signature(tuple([t.dtype for t in tensors]), tuple(map(_shape, tensors)))


def _shape(tensor: Tensor) -> torch.Size:
    """The shape of a tensor; of a nested one, which need not have any, that of all that it holds."""
    return stored(tensor).shape if tensor.is_nested else tensor.shape
