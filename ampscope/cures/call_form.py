"""A call form says which call it may replace, and what is called instead.

Forms are read where torch is not installed: they import it where they make a call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

from ampscope.trace.schema import Form

if TYPE_CHECKING:
    from torch import Tensor

#: Units of a dtype's eps up to which another value is the same one, rounded elsewhere.
ROUNDING = 4.0
#: What a trace holds of a form that lasts.
Written = Mapping[str, Any]
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


class CallingLine(Protocol):
    """A line of a program."""

    @property
    def file(self) -> str:
        """The path of its file."""

    @property
    def line(self) -> int:
        """Its number, from 1."""


class CallPlace(NamedTuple):
    """The line at which a call is made."""

    file: str
    line: int

    def is_at(self, place: CallingLine) -> bool:
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

    def tensor(self, number: int = 0) -> Tensor | None:
        """Returns an operand, counted as in `operands`; None where there is none, or it is no tensor."""
        import torch

        given = self.operands[number : number + 1]
        return given[0] if given and isinstance(given[0], torch.Tensor) else None

    def argument(self, number: int, name: str) -> Any:
        """Returns what is given by place or by name; None where neither is."""
        return self.kwargs.get(name, next(iter(self.args[number:]), None))

    def with_operand(self, number: int, value: Any) -> Call:
        """Returns the call with another operand, counted as in `operands`."""
        reflected = getattr(self.function, "__name__", "") in _REFLECTED
        position = len(self.args) - 1 - number if reflected else number
        return self._replace(args=(*self.args[:position], value, *self.args[position + 1 :]))

    def __call__(self) -> Any:
        """Makes the call."""
        return self.function(*self.args, **self.kwargs)


class ComparedValues(NamedTuple):
    """The values that a call gives as it is written, and those that its other form gives in its place."""

    before: object
    after: object
    exact: object = None  #: what the code means, computed in float64: ``before`` may be further from it than ``after``
    least: float = 0.0  #: the magnitude to which a change of smaller values is related
    condition: Tensor | float = 1.0  #: by how many units of eps these move where an operand is rounded by one


class Lent(NamedTuple):
    """The functions that a replay lends a form."""

    version_of: Callable[[Tensor], int]  #: the counter of writes into a tensor
    in_float32: Callable[[Callable[..., Any]], Callable[..., Any]]  #: a function, outside of autocast on float32


class CallForm:
    """Another form of one call. A subclass says which one, and what is called instead.

    Attributes:
        form: How it is named in the trace.
        same_function: It calls the function that the code calls, and returns what that returns.
        live_as: How a lasting cure with this form is named; empty for one that is only tried in replays.
        in_loss_alone: It lasts in the loop's own code alone, where what other calls have returned is known.
        calls: Names of the functions that it may replace, as `Call.name` gives them; empty where it knows the call
            otherwise.
        argument: The operand that is changed; None where the form is about the call as a whole.
        value: The number that goes in.
        was: The number that stood there.
        at: The line that makes the call; None for that of the call that failed.
        made_at: The line that makes what the call reads; None where that is not part of the form.
        milder: The same form with another number, for where the gradients of this one are too large.
    """

    form: ClassVar[Form]
    same_function: ClassVar[bool] = False
    live_as: ClassVar[str] = ""
    in_loss_alone: ClassVar[bool] = False
    lent: Lent
    known: Followed[Any]

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
        self.made_at: CallPlace | None = None
        self.milder: CallForm | None = None

    def for_replay(self, lent: Lent) -> Self:
        """Makes one of its own, for a replay, that has seen nothing."""
        form = copy.copy(self)
        form.lent, form.known = lent, Followed(lent.version_of)
        return form

    def fits(self, call: Call) -> bool:
        """Whether a call of one of `calls`, at the place, is the one that is meant."""
        return True

    def belongs(self, call: Call) -> bool:
        """Whether a call at another place is made otherwise too, because of what `instead` returned before."""
        return False

    def follows(self, call: Call, place: Callable[[], CallingLine]) -> bool:
        """Whether the form may need to know later what a call of the forward has returned.

        Args:
            call: A call that is made as it was written, wherever.
            place: Gives the line that makes it.
        """
        return False

    def saw(self, call: Call, result: object) -> Iterable[ComparedValues]:
        """Told of a call that it `follows`, outside of what is observed; gives what is to be compared there."""
        return ()

    def release(self) -> None:
        """Lets go of what it has kept of a replay."""
        self.known.clear()

    def instead(self, call: Call) -> object:
        """Computes what is returned in the call's place; ``NotImplemented`` where the form does not apply.

        Args:
            call: A call of one of `calls`, at the place of the failure.
        """
        raise NotImplementedError

    def before(self, call: Call) -> object:
        """Makes the call as it was written: its result is compared with that of `instead`."""
        return call()

    def good(self, before: Tensor) -> Tensor:
        """Marks the elements of the result of `before` that were well as they were."""
        return before.isfinite()

    def compared(self, call: Call, result: object) -> Iterable[ComparedValues]:
        """Gives the values that tell whether good ones have changed; outside of what is observed.

        Args:
            call: The call in whose place the form stood.
            result: What that gave.
        """
        return (ComparedValues(self.before(call), result),)

    @property
    def asked(self) -> str:
        """The functions that it may replace, as a lasting cure tells them."""
        return "/".join(sorted(self.calls))

    @property
    def told(self) -> str:
        """Tells in words what a lasting cure with this form does."""
        raise NotImplementedError

    def written(self) -> Written:
        """Returns what a trace holds of a lasting cure with this form, for `read`."""
        return {
            "is": self.live_as,
            "calls": sorted(self.calls),
            "argument": self.argument,
            "value": self.value,
            "was": self.was,
            "lowest": False,
            "keeps": False,
        }

    @classmethod
    def read(cls, written: Written, at: CallPlace) -> CallForm:
        """Makes the form again, from what was `written`.

        Args:
            written: That.
            at: The line that makes the call.
        """
        return cls(calls_of(written))


def calls_of(written: Written) -> frozenset[str]:
    """The functions that a form may replace, of what was written of it."""
    return frozenset(map(str, written.get("calls", ())))


_Known = TypeVar("_Known")


class Followed(Generic[_Known]):
    """Remembers what is known of tensors, as long as nothing writes into them; keeps them.

    Args:
        version_of: The counter of writes into a tensor.
    """

    def __init__(self, version_of: Callable[[Tensor], int]) -> None:
        self._version_of = version_of
        self._known: dict[int, tuple[Tensor, int, _Known]] = {}

    def note(self, tensor: object, known: _Known) -> None:
        """Something is known of what a call has returned."""
        import torch

        if isinstance(tensor, torch.Tensor):
            self._known[id(tensor)] = tensor, self._version_of(tensor), known

    def of(self, value: object) -> _Known | None:
        """Returns what is known of a tensor; None of any other, and of one that was written into since."""
        tensor, version, known = self._known.get(id(value), (None, 0, None))
        return known if tensor is not None and self._version_of(tensor) == version else None

    def reads(self, call: Call) -> bool:
        """Whether a call is given a tensor of which something is known."""
        return any(self.of(value) is not None for value in (*call.args, *call.kwargs.values()))

    def items(self, call: Call) -> list[_Known | None]:
        """Returns what is known of each positional argument."""
        return [self.of(value) for value in call.args]

    def clear(self) -> None:
        """Lets go of all of them."""
        self._known.clear()
