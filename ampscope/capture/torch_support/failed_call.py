"""Finds, by an exception's traceback, the call that raised it: op, module and line, as plain data."""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, FunctionType, ModuleType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.torch_support.guard import Suppressed
from ampscope.capture.torch_support.user_line import NOWHERE, Place, is_capture, is_inner, user_place
from ampscope.trace.evidence import RaisedError
from ampscope.trace.redaction import redacted
from ampscope.trace.schema import Phase

#: What torch says of a number that does not fit the tensor's dtype.
_DOES_NOT_FIT = re.compile(r"value cannot be converted to type (?:c10|at)::(\w+) without overflow")
_DTYPES = {"Half": "float16", "BFloat16": "bfloat16"}
#: How errors speak of numbers that are not finite.
_NOT_FINITE = re.compile(
    r"\b(nans?|infs?|infinit\w*|non-?finite|not finite|isfinite|isnan|isinf|invalid (values?|numeric|numbers?)|"
    r"converge|singular|(positive|negative)[- ](semi-?)?definite|out of range float|overflow)\b",
    re.IGNORECASE,
)
#: By these a program tells itself something.
_CONTROL_FLOW = (StopIteration, StopAsyncIteration)
_OPERATORS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.MatMult: "matmul", ast.Pow: "pow"}
_OPS_IN_PYTHON = ("torch.functional", "torch.nn.functional", "torch._tensor")
_MESSAGE = 300
_UNKNOWN = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedCall(RaisedError):
    """A call that raised; nothing of it is kept alive."""

    @property
    def speaks_of_values(self) -> bool:
        """Whether the error, or the line that it was raised at, is about numbers that are not finite."""
        return not self.does_not_fit and _NOT_FINITE.search(f"{self.message} {self.code}") is not None


def of_error(error: BaseException | None, names: Mapping[int, str], *, on_purpose: bool = False) -> FailedCall | None:
    """The call that raised, from the traceback of an exception that a hook of AMPscope's sees pass.

    Args:
        error: The exception.
        names: Qualified names of the watched modules by ``id``.
        on_purpose: Whether what a program raises by a ``raise`` of its own counts, too.

    Returns:
        None for what a program raises on purpose, by a ``raise`` of its own or to tell itself something.
    """
    if not isinstance(error, Exception | SystemExit) or isinstance(error, _CONTROL_FLOW):
        return None
    steps = list(_steps(error.__traceback__))
    if not steps or (_raises(steps[-1]) and not on_purpose):
        return None
    users = [index for index, step in enumerate(steps) if not is_inner(step.tb_frame.f_code.co_filename)]
    user = steps[users[-1]] if users else None
    place = Place(user.tb_frame.f_code, user.tb_lineno) if user is not None else user_place() or NOWHERE
    module = next((each for step in reversed(steps) if (each := _module(step.tb_frame, names)) is not None), None)
    where = (names[id(module)], type(module).__name__) if module is not None else ("", "")
    return _described(error, lambda: _first_op(steps[users[-1] if users else 0 :]), place, where)


def phase_of(error: BaseException, names: Mapping[int, str]) -> Phase:
    """Returns the phase of the step in which an exception was raised, by the frames that it has left."""
    steps = list(_steps(error.__traceback__))
    if any(_self_of(step.tb_frame, Optimizer) is not None for step in steps):
        return Phase.OPTIMIZER
    return Phase.FORWARD if any(_module(step.tb_frame, names) is not None for step in steps) else Phase.LOSS


def of_function(error: Exception, func: Callable[..., Any], args: Any, kwargs: Any) -> FailedCall | None:
    """Describes the failed call of a torch function that the loop called by itself; None for control flow."""
    if isinstance(error, _CONTROL_FLOW):
        return None
    return _described(
        error, lambda: _Call(getattr(func, "__name__", ""), [*args, *kwargs.values()]), user_place() or NOWHERE
    )


class _Call(NamedTuple):
    """A function call in a source line: the name called, and its arguments."""

    name: str = ""
    values: Sequence[Any] = ()


def _described(
    error: BaseException, look: Callable[[], _Call], place: Place, module: tuple[str, str] = ("", "")
) -> FailedCall:
    """An error and its call, of which ``look`` tells what it can: what a program holds may be half made, or lie."""
    message, call, op, numbers, of_tensor = "", _Call(), "", list[float](), ""
    with Suppressed():
        message = redacted((str(error).splitlines() or [""])[0])[:_MESSAGE]
    with Suppressed():
        call = look()
        op = _overload(call)
        tensor = next((value for value in call.values if issubclass(type(value), Tensor)), None)
        of_tensor = str(tensor.dtype).partition(".")[2] if tensor is not None else ""
        numbers = [float(value) for value in call.values if _is_number(value)]
    fits_not = _DOES_NOT_FIT.search(message)
    return FailedCall(
        error=type(error).__name__,
        message=message,
        file=place.file,
        line=place.line,
        function=place.function,
        code=place.text,
        op=op,
        module=module[0],
        module_type=module[1],
        dtype=_DTYPES.get(fits_not[1], fits_not[1]) if fits_not else of_tensor,
        value=max(numbers, key=abs, default=None) if fits_not else None,
        does_not_fit=fits_not is not None,
    )


def _steps(trace: TracebackType | None) -> Iterator[TracebackType]:
    """Frame by frame, the outermost first, without AMPscope's own."""
    while trace is not None:
        if not is_capture(trace.tb_frame.f_code.co_filename):
            yield trace
        trace = trace.tb_next


def _raises(step: TracebackType) -> bool:
    """Whether the user's own code raised here, rather than what it called."""
    code = step.tb_frame.f_code
    if is_inner(code.co_filename):
        return False
    name = next((each.opname for each in dis.get_instructions(code) if each.offset == step.tb_lasti), "")
    return name in ("RAISE_VARARGS", "RERAISE")


def _module(frame: FrameType, names: Mapping[int, str]) -> nn.Module | None:
    found = _self_of(frame, nn.Module)
    return found if id(found) in names else None


def _self_of(frame: FrameType, kind: type) -> Any:
    """The object whose method runs in a frame, if it is one of a ``kind``; None of others. Asks the object nothing."""
    found: Any = None
    with Suppressed():  # a namespace may be of the program's own making
        found = frame.f_locals.get("self")
    return found if issubclass(type(found), kind) else None


# -- the call, as its line shows it -----------------------------------------------------------------------------------


def _first_op(steps: Sequence[TracebackType]) -> _Call:
    """The outermost call of an op, which is the user's own where that is one; else the outermost call."""
    calls = [_call(step) for step in steps]
    return next(filter(_overload, calls), calls[0])


def _call(step: TracebackType) -> _Call:
    """The name of what was called, and its arguments as far as they can be looked up without running anything."""
    frame = step.tb_frame
    positions = list(frame.f_code.co_positions())[step.tb_lasti // 2]
    node = _parsed(frame.f_code.co_filename, *positions)
    if isinstance(node, ast.BinOp):
        return _Call(_OPERATORS.get(type(node.op), ""), [_value(node.left, frame), _value(node.right, frame)])
    if not isinstance(node, ast.Call):
        return _Call()
    if _is_program(_value(node.func, frame)):
        return _Call()
    values = [_value(each, frame) for each in [*node.args, *(keyword.value for keyword in node.keywords)]]
    if isinstance(node.func, ast.Attribute):
        owner = _value(node.func.value, frame)
        return _Call(node.func.attr, values if type(owner) is ModuleType else [owner, *values])
    return _Call(node.func.id if isinstance(node.func, ast.Name) else "", values)


def _is_program(called: Any) -> bool:
    """Whether what was called is a function in Python, which may have the name of an op, and none of torch's own."""
    return type(called) is FunctionType and called.__module__ not in _OPS_IN_PYTHON


def _parsed(filename: str, line: int | None, last: int | None, column: int | None, end: int | None) -> ast.expr | None:
    """The expression at a position; columns count bytes."""
    if line is None or last is None or column is None or end is None:
        return None
    lines = [linecache.getline(filename, number).encode() for number in range(line, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][column:]
    try:
        return ast.parse(f"({b''.join(lines).decode()})", mode="eval").body
    except (SyntaxError, UnicodeDecodeError):
        return None


def _value(node: ast.expr, frame: FrameType) -> Any:
    """A literal, a name or an attribute of a plain object; anything else is not looked up, for that would run code."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        pass
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id, _UNKNOWN))
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, frame)
        return inspect.getattr_static(owner, node.attr, _UNKNOWN) if owner is not _UNKNOWN else _UNKNOWN
    return _UNKNOWN


# -- its op -----------------------------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return issubclass(type(value), (int, float)) and type(value) is not bool


def _overload(call: _Call) -> str:
    """The overload of an ATen op that takes such arguments; where none is known to, the op without one."""
    name = call.name
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() and name != "backward" else None
    if packet is None or not hasattr(packet, "overloads"):  # aten has methods in Python, too
        return ""
    for overload in packet.overloads():
        schema = getattr(packet, overload)._schema
        if "out" not in overload and _takes(schema.arguments, call.values):
            return f"aten.{name}.{overload}"
    return f"aten.{name}.default"


def _takes(arguments: Any, values: Sequence[Any]) -> bool:
    if len(values) > len(arguments):
        return False
    return all(
        str(argument.type) == "Tensor"
        if issubclass(type(value), Tensor)
        else _is_scalar(argument) or not _is_number(value)
        for argument, value in zip(arguments, values, strict=False)
    )


def _is_scalar(argument: Any) -> bool:
    return str(argument.type).removeprefix("Optional[").rstrip("]") in ("number", "float", "int")
