"""Knows an op that runs again: a training step repeats itself, and what has been described once need not be again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.torch_support.user_line import Place
from ampscope.capture.tracing import operators
from ampscope.capture.tracing.operators import Operator
from ampscope.trace.schema import Phase

#: Arguments that can be compared with those of another time and keep nothing alive.
_PLAIN = frozenset(
    {bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
#: Executions of one op under the same circumstances that are remembered: with other shapes, with other numbers.
_MOST_EXECUTIONS = 8
#: Circumstances that are remembered: a program may make its code as it runs.
_MOST_CIRCUMSTANCES = 50_000


class Made(NamedTuple):
    """An execution of an op as the trace keeps it, besides its measured numbers."""

    site: int
    numels: tuple[int, ...]  #: of each output, elements
    edges: tuple[tuple[int, bool], ...] = ()  #: of each operand, its position and whether it is overwritten


#: The arguments of a call, and those given by name.
Call = tuple[tuple[Any, ...], dict[str, Any]]
#: Of an op that has run: what it leaves in the trace besides its numbers, its operands and its results as they are
#: `stored`, and the positions of the operands that it overwrote. A plain tuple, for it is made for every op.
Ran = tuple[Made, list[Tensor], list[Tensor], tuple[int, ...]]
_STRIDED = torch.strided
#: In place of the dtype of a list of tensors.
_OF_EACH = object()


class _Argument(NamedTuple):
    """An argument as it was."""

    kind: type
    dtype: Any  #: of a tensor; None for what is none
    value: Any  #: a tensor's shape; dtype and shape of each in a list; else the argument itself


class Execution(NamedTuple):
    """An op as it once ran."""

    named: tuple[str, ...]  #: the names of the last of its arguments
    args: tuple[_Argument, ...]
    results: tuple[tuple[torch.dtype, torch.Size], ...]  #: dtype and shape of each output
    overwritten: tuple[int, ...]  #: positions of the operands that it overwrote
    made: Made  #: what it left in the trace


class Circumstances:
    """The place and state under which an op runs; one object for each, so that equal ones are identical.

    Attributes:
        phase: In which part of the step.
        module: Qualified name of the innermost watched module; None outside of all.
        place: The user's line.
        function: Name of the torch function that the op belongs to.
        autocast: Dtype of the enclosing autocast region; None outside.
        grad_fn: In backward, the name of the autograd node that is evaluated.
        forward_site: In backward, the site of the op that made this node.
        executions: By operator, those that are remembered.
        views: By operator, the sites of those that compute nothing.
    """

    __slots__ = (
        "autocast",
        "executions",
        "forward_site",
        "function",
        "grad_fn",
        "module",
        "phase",
        "place",
        "views",
    )

    def __init__(
        self,
        place: Place,
        *,
        phase: Phase,
        module: str | None,
        function: str,
        autocast: torch.dtype | None,
        grad_fn: str = "",
        forward_site: int | None = None,
    ) -> None:
        self.phase = phase
        self.module = module
        self.place = place
        self.function = function
        self.autocast = autocast
        self.grad_fn = grad_fn
        self.forward_site = forward_site
        self.views: dict[str, int] = {}
        self.executions: dict[str, list[Execution]] = {}

    def again(  # noqa: C901, PLR0912  # one frame for every op
        self, operator: Operator, call: Call, results: list[Tensor], written: list[Tensor]
    ) -> Ran | None:
        """Recalls an op that runs as it once did; None where that is not remembered.

        Args:
            operator: The op.
            call: Its arguments.
            results: What it gave.
            written: The tensors that it overwrote.
        """
        args, kwargs = call
        values: Any = (*args, *kwargs.values()) if kwargs else args
        for named, known_args, known_results, known_overwritten, made in self.executions.get(operator.name, ()):
            if len(values) != len(known_args) or tuple(kwargs) != named or len(results) != len(known_results):
                continue
            operands: list[Tensor] = []
            given: Any = zip(values, known_args, strict=True)
            for value, (kind, dtype, known) in given:
                if value.__class__ is not kind:
                    break
                if dtype is None:
                    if value != known:
                        break
                elif dtype is _OF_EACH:
                    held = [each for each in value if isinstance(each, Tensor)]
                    if not _are(held, known):
                        break
                    operands += held
                elif (
                    value.dtype is not dtype or value.layout is not _STRIDED or value.is_nested or value.shape != known
                ):
                    break
                else:
                    operands.append(value)
            else:
                for tensor, (dtype, shape) in zip(results, known_results, strict=True):
                    if tensor.dtype is not dtype or tensor.is_nested or tensor.layout is not _STRIDED:
                        break
                    if tensor.shape != shape:
                        break
                else:
                    if operator.draws:
                        del operands[0]
                    overwritten = operators.among(operands, written) if written else ()
                    if overwritten == known_overwritten:
                        return made, operands, results, overwritten
        return None

    def ran(self, operator: str, call: Call, results: list[Tensor], overwritten: tuple[int, ...], made: Made) -> None:
        """Remembers an execution, where all that its site depends on can be compared with another's."""
        given, given_by_name = call
        described = [_described(value) for value in (*given, *given_by_name.values())]
        args = tuple([each for each in described if each is not None])
        if len(args) < len(described) or not all(map(_is_plain, given_by_name.values())):
            return
        if not all(map(_is_comparable, results)):
            return
        known = self.executions.setdefault(operator, [])
        if len(known) >= _MOST_EXECUTIONS:
            known.pop()
        gave = tuple([(result.dtype, result.shape) for result in results])
        known.insert(0, Execution(tuple(given_by_name), args, gave, overwritten, made))


class Met:
    """The circumstances that a run has met.

    Attributes:
        evaluations: Of them, those of backward's own ops, by the site of the forward op and what else makes them.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Circumstances] = {}
        self.evaluations: dict[tuple[Any, ...], Circumstances] = {}

    def of(
        self,
        place: Place,
        *,
        phase: Phase,
        module: str | None,
        function: str,
        autocast: torch.dtype | None,
        grad_fn: str = "",
        forward_site: int | None = None,
    ) -> Circumstances:
        """Returns the circumstances with these properties, always the same object for the same ones."""
        code, line = place  # a code object's own hash reads all of it
        key = (phase, module, id(code), line, function, autocast, grad_fn, forward_site)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_CIRCUMSTANCES:
                self._known.clear()
                self.evaluations.clear()
            known = self._known[key] = Circumstances(
                place,
                phase=phase,
                module=module,
                function=function,
                autocast=autocast,
                grad_fn=grad_fn,
                forward_site=forward_site,
            )
        return known


def _described(value: Any) -> _Argument | None:
    """An argument as it will be compared; None for one that cannot be."""
    if isinstance(value, Tensor):
        return _Argument(type(value), value.dtype, value.shape) if _is_comparable(value) else None
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        held = [each for each in value if isinstance(each, Tensor)]
        if not all(map(_is_comparable, held)):
            return None
        return _Argument(type(value), _OF_EACH, tuple([(each.dtype, each.shape) for each in held]))
    return _Argument(type(value), None, _kept(value)) if _is_plain(value) else None


def _is_comparable(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and memory of its own."""
    return not tensor.is_nested and tensor.layout is torch.strided


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(type(item) in _PLAIN for item in value)
    return type(value) in _PLAIN


def _kept(value: Any) -> Any:
    """Copies a list, which its owner may change; returns anything else as it is."""
    return list(value) if isinstance(value, list) else value


def _are(tensors: list[Tensor], described: tuple[tuple[torch.dtype, torch.Size], ...]) -> bool:
    """Whether tensors have these dtypes and shapes."""
    if len(tensors) != len(described):
        return False
    for tensor, (dtype, shape) in zip(tensors, described, strict=True):
        if tensor.dtype is not dtype or tensor.is_nested or tensor.layout is not _STRIDED or tensor.shape != shape:
            return False
    return True
