"""The logarithm of a probability is followed through a program, to be computed of what made the probability."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ampscope.cures.call_form import Call

if TYPE_CHECKING:
    from torch import Tensor

TensorChange = Callable[["Tensor"], "Tensor"]

#: Functions that choose or rearrange elements: of logarithms the same ones.
_CHOOSES = frozenset(
    {
        *("__getitem__", "gather", "take", "take_along_dim", "index_select", "masked_select", "select", "narrow"),
        *("squeeze", "unsqueeze", "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "diagonal"),
        *("transpose", "permute", "movedim", "swapaxes", "t", "expand", "expand_as", "repeat", "roll", "flip"),
        *("contiguous", "clone", "detach", "amax", "amin"),
    }
)
#: Functions that give the same numbers in another dtype.
_CONVERTS = frozenset({"to", "float", "half", "bfloat16", "double", "type", "type_as"})
_CLAMPS = frozenset({"clamp", "clip", "clamp_min", "clamp_max"})
#: What is added to a probability, or bounds it, only to keep it from zero.
_SMALL = 1e-2


class Later:
    """A tensor that is computed when it is first asked for."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._value: Tensor | None = None

    def __call__(self) -> Tensor:
        """The tensor."""
        if self._value is None:
            self._value = self._compute()
        return self._value

    def then(self, change: TensorChange) -> Later:
        """Returns what a function makes of the tensor; it is computed when it is first asked for, too."""
        return Later(lambda: change(self()))


class LogVersion(NamedTuple):
    """Holds what is known of a tensor besides its values."""

    log: Later  #: its logarithm
    exact: Later  #: the tensor as the code means it, computed in float64
    rest: Later | None = None  #: the logarithm of one minus it
    logits: Later | None = None  #: of what it is the sigmoid
    scores: Later | None = None  #: of what it is the softmax over the second dimension

    def mapped(self, change: TensorChange) -> LogVersion:
        """Returns what is known of chosen, or rearranged, elements; ``change`` chooses them."""
        rest = self.rest.then(change) if self.rest is not None else None
        logits = self.logits.then(change) if self.logits is not None else None
        return LogVersion(self.log.then(change), self.exact.then(change), rest, logits)


def log_begun(call: Call) -> LogVersion | None:
    """Returns what is known of the result of a softmax, a sigmoid or an exponential; None of another call."""
    from torch.nn import functional

    given = call.tensor()
    if given is None:
        return None
    if call.name == "softmax":
        dim = call.argument(1, "dim")
        if not isinstance(dim, int):
            return None
        return LogVersion(
            Later(lambda: functional.log_softmax(given, dim)),
            Later(lambda: given.detach().double().softmax(dim)),
            scores=Later(lambda: given) if dim in (1, 1 - given.dim()) else None,
        )
    if call.name == "sigmoid":
        return LogVersion(
            Later(lambda: functional.logsigmoid(given)),
            Later(lambda: given.detach().double().sigmoid()),
            Later(lambda: functional.logsigmoid(-given)),
            Later(lambda: given),
        )
    return (
        LogVersion(Later(lambda: given), Later(lambda: given.detach().double().exp())) if call.name == "exp" else None
    )


def log_after(call: Call, known: list[LogVersion | None]) -> LogVersion | None:
    """Derives what is known of a call's result; None where it follows from nothing.

    Args:
        call: The call.
        known: What is known of its positional arguments.
    """
    name = call.name.rstrip("_") if not call.name.startswith("__") else call.name
    first = known[0] if known else None
    others = [each for each in known[1:] if each is not None]
    if first is not None and not others:
        return _of_one(call, name, first)
    numbers = [value for value in call.operands if isinstance(value, (int, float))]
    if first is None and len(others) == 1 and name == "sub" and numbers and call.operands[0] is numbers[0]:
        return _one_minus(others[0], float(numbers[0]))
    if name == "where" and len(known) == 3 and known[1] is not None and known[2] is not None:
        return _chosen(call.args[0], known[1], known[2])
    if first is not None and len(known) == 2 and others:
        return _of_two(name, first, others[0])
    return None


def _of_one(call: Call, name: str, known: LogVersion) -> LogVersion | None:
    numbers = [value for value in (*call.operands, *call.kwargs.values()) if isinstance(value, (int, float))]
    if name in _CHOOSES:
        return known.mapped(lambda tensor: call._replace(args=(tensor, *call.args[1:]))())
    if name in _CONVERTS:
        return known
    if name in _CLAMPS and all(abs(each) <= _SMALL or each >= 1 - _SMALL for each in numbers):
        return known._replace(exact=known.exact.then(lambda tensor: call._replace(args=(tensor, *call.args[1:]))()))
    if name in ("sum", "mean"):
        return _summed(call, name, known)
    return _shifted(call, name, known, float(numbers[0])) if len(numbers) == 1 and len(call.args) == 2 else None


def _shifted(call: Call, name: str, known: LogVersion, number: float) -> LogVersion | None:
    """Adds a small number, which the logarithm does not need; or takes the tensor from a number."""
    if name == "rsub" or (name == "sub" and call.operands[0] is not call.args[0]):
        return _one_minus(known, number)
    return _shift(known, -number if name == "sub" else number) if name in ("add", "sub") else None


def _shift(known: LogVersion, number: float) -> LogVersion | None:
    if not 0 < number <= _SMALL:
        return None
    return known._replace(exact=known.exact.then(lambda tensor: tensor + number))


def _one_minus(known: LogVersion, number: float) -> LogVersion | None:
    """Takes a probability from one; a number just above one keeps the result from zero."""
    if known.rest is None or not 1 <= number <= 1 + _SMALL:
        return None
    logits = known.logits.then(lambda tensor: tensor.neg()) if known.logits is not None else None
    return LogVersion(known.rest, known.exact.then(lambda tensor: number - tensor), known.log, logits)


def _summed(call: Call, name: str, known: LogVersion) -> LogVersion | None:
    """A sum, or a mean, over some dimensions."""
    if "dtype" in call.kwargs or "axis" in call.kwargs:
        return None
    dims = call.argument(1, "dim")
    keeps = bool(call.argument(2, "keepdim"))

    def summed(log: Tensor) -> Tensor:
        over = tuple(range(log.dim())) if dims is None else dims
        total = log.logsumexp(over, keeps)
        return total - math.log(log.numel() / total.numel()) if name == "mean" else total

    return LogVersion(known.log.then(summed), known.exact.then(lambda t: call._replace(args=(t, *call.args[1:]))()))


def _chosen(condition: Any, one: LogVersion, other: LogVersion) -> LogVersion:
    def of(a: Later, b: Later) -> Later:
        return Later(lambda: a().where(condition, b()))

    rest = of(one.rest, other.rest) if one.rest is not None and other.rest is not None else None
    logits = of(one.logits, other.logits) if one.logits is not None and other.logits is not None else None
    return LogVersion(of(one.log, other.log), of(one.exact, other.exact), rest, logits)


def _of_two(name: str, one: LogVersion, other: LogVersion) -> LogVersion | None:
    """Combines two tensors: by the sum of the logarithms for a product, by the difference for a quotient."""
    if name == "mul":
        return LogVersion(Later(lambda: one.log() + other.log()), Later(lambda: one.exact() * other.exact()))
    if name == "div":
        return LogVersion(Later(lambda: one.log() - other.log()), Later(lambda: one.exact() / other.exact()))
    return None
