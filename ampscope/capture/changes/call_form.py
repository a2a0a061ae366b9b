"""A call form says which call it may replace, and what is called instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.function_names import is_in_place
from ampscope.capture.torch_support.user_line import Place
from ampscope.trace.schema import Form

#: What code spells as an operator, by the name of the function that torch calls for it.
_SPELLED = {
    "__truediv__": "div",
    "__rtruediv__": "div",
    "__rdiv__": "div",
    "true_divide": "div",
    "divide": "div",
    "__matmul__": "matmul",
    "__rmatmul__": "matmul",
    "__pow__": "pow",
    "__rpow__": "pow",
    "__mul__": "mul",
    "__rmul__": "mul",
    "multiply": "mul",
    "__add__": "add",
    "__radd__": "add",
    "__sub__": "sub",
    "__rsub__": "sub",
    "subtract": "sub",
}
#: Operators whose function gets the operands the other way round.
_REFLECTED = frozenset({"__rtruediv__", "__rdiv__", "__rmatmul__", "__rpow__", "__rsub__"})


class CallPlace(NamedTuple):
    """The line at which a call is made."""

    file: str
    line: int

    def is_at(self, place: Place) -> bool:
        """Whether a line of the program is this one."""
        return place.line == self.line and place.file == self.file


class Call(NamedTuple):
    """A call of a torch function that is being made."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name as code spells it: ``log``, ``div``; the same for a function, a method and an operator."""
        name = getattr(self.function, "__name__", "")
        return _SPELLED.get(name, name)

    @property
    def operands(self) -> tuple[Any, ...]:
        """The positional arguments in the order in which code writes them: of ``1 / x`` the number first."""
        reflected = getattr(self.function, "__name__", "") in _REFLECTED
        return self.args[::-1] if reflected else self.args

    def with_operand(self, number: int, value: Any) -> Call:
        """Returns the call with another operand, counted as in `operands`."""
        reflected = getattr(self.function, "__name__", "") in _REFLECTED
        position = len(self.args) - 1 - number if reflected else number
        return self._replace(args=(*self.args[:position], value, *self.args[position + 1 :]))

    def __call__(self) -> Any:
        """Makes the call."""
        return self.function(*self.args, **self.kwargs)


class Compared(NamedTuple):
    """The values that a call gives as it is written, and those that its other form gives in its place."""

    before: Any
    after: Any
    exact: Any = None  #: what the code means, computed in float64: ``before`` may be further from it than ``after``
    least: float = 0.0  #: the magnitude to which a change of smaller values is related
    condition: Tensor | float = 1.0  #: by how many units of eps these move where an operand is rounded by one


class CallForm:
    """Another form of one call. A subclass says which one, and what is called instead.

    Attributes:
        form: How it is named in the trace.
        same_function: It calls the function that the code calls, and returns what that returns.
        calls: Names of the functions that it may replace, as `Call.name` gives them; empty where it knows the call
            otherwise.
        argument: The operand that is changed; None where the form is about the call as a whole.
        value: The number that goes in.
        was: The number that stood there.
        at: The line that makes the call; None for that of the call that failed.
        milder: The same form with another number, for where the gradients of this one are too large.
    """

    form: ClassVar[Form]
    same_function: ClassVar[bool] = False

    def __init__(
        self,
        calls: frozenset[str],
        *,
        argument: int | None = None,
        value: float | None = None,
        was: float | None = None,
    ) -> None:
        self.calls = calls
        self.argument = argument
        self.value = value
        self.was = was
        self.at: CallPlace | None = None
        self.milder: CallForm | None = None

    def fits(self, call: Call) -> bool:
        """Whether a call of one of `calls`, at the place, is the one that is meant."""
        return True

    def belongs(self, call: Call) -> bool:
        """Whether a call at another place is made otherwise too, because of what `instead` returned before."""
        return False

    def follows(self, call: Call, place: Callable[[], Place]) -> bool:
        """Whether the form may need to know later what a call of the forward has returned.

        Args:
            call: A call that is made as it was written, wherever.
            place: Gives the line that makes it.
        """
        return False

    def saw(self, call: Call, result: Any) -> Iterable[Compared]:
        """Told of a call that it `follows`, outside of what is observed; gives what is to be compared there."""
        return ()

    def release(self) -> None:
        """Lets go of what it has kept of a replay."""

    def instead(self, call: Call) -> Any:
        """Computes what is returned in the call's place; ``NotImplemented`` where the form does not apply.

        Args:
            call: A call of one of `calls`, at the place of the failure.
        """
        raise NotImplementedError

    def made(self, call: Call) -> Any:
        """Makes the call in this form, as `instead` does; writes into the tensor that it is to write (``out``), too.

        Where the call writes over its own operand, what code reads may be that operand, which only the same function
        with other arguments writes.
        """
        out = call.kwargs.get("out")
        if out is None:
            overwrites = is_in_place(call.function, {}) or call.kwargs.get("inplace") is True
            return NotImplemented if overwrites and not self.same_function else self.instead(call)
        others = {name: value for name, value in call.kwargs.items() if name != "out"}
        result = self.instead(call._replace(kwargs=others))
        if not (isinstance(out, Tensor) and isinstance(result, Tensor) and out.shape == result.shape):
            return NotImplemented
        with torch.no_grad():  # no function differentiates what it writes there
            return out.copy_(result)

    def before(self, call: Call) -> Any:
        """Makes the call as it was written: its result is compared with that of `instead`."""
        return call()

    def good(self, before: Tensor) -> Tensor:
        """Marks the elements of the result of `before` that were well as they were."""
        return before.isfinite()

    def compared(self, call: Call, result: Any) -> Iterable[Compared]:
        """Gives the values that tell whether good ones have changed; outside of what is observed.

        Args:
            call: The call in whose place the form stood.
            result: What that gave.
        """
        return (Compared(self.before(call), result),)


class OperandBound(CallForm):
    """An operand that is bounded.

    Args:
        calls: See `CallForm`.
        argument: The operand.
        value: The bound.
        lowest: It is one from below, not from above.
    """

    form = Form.OPERAND_BOUND

    def __init__(self, calls: frozenset[str], argument: int, value: float, *, lowest: bool) -> None:
        super().__init__(calls, argument=argument, value=value)
        self.lowest = lowest

    def instead(self, call: Call) -> Any:
        """See `CallForm.instead`."""
        operand = call.operands[self.argument or 0]
        if not isinstance(operand, Tensor):
            return NotImplemented
        bounded = operand.clamp(min=self.value) if self.lowest else operand.clamp(max=self.value)
        return call.with_operand(self.argument or 0, bounded)()


_Known = TypeVar("_Known")


class Followed(Generic[_Known]):
    """Remembers what is known of tensors, as long as nothing writes into them; keeps them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, _Known]] = {}

    def note(self, tensor: Any, known: _Known) -> None:
        """Something is known of what a call has returned."""
        if isinstance(tensor, Tensor):
            self._known[id(tensor)] = tensor, torch_private.version_counter(tensor), known

    def of(self, value: Any) -> _Known | None:
        """Returns what is known of a tensor; None of any other, and of one that was written into since."""
        tensor, version, known = self._known.get(id(value), (None, 0, None))
        return known if tensor is not None and torch_private.version_counter(tensor) == version else None

    def reads(self, call: Call) -> bool:
        """Whether a call is given a tensor of which something is known."""
        return any(self.of(value) is not None for value in (*call.args, *call.kwargs.values()))

    def items(self, call: Call) -> list[_Known | None]:
        """Returns what is known of each positional argument."""
        return [self.of(value) for value in call.args]

    def clear(self) -> None:
        """Lets go of all of them."""
        self._known.clear()
