"""These forms compute softmax and its logarithms stably: from logits, or with the maximum taken off."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ampscope.capture.changes.call_form import Call, CallForm, CallPlace, Compared, Followed
from ampscope.capture.changes.failure import FailedCall, name_of_op, ops_after, ops_before, place_of_op
from ampscope.capture.changes.safe_operands import LOGARITHMS
from ampscope.capture.torch_support.user_line import Place
from ampscope.trace.schema import Form

TensorChange = Callable[[Tensor], Tensor]

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
    given = call.operands[0] if call.operands else None
    if not isinstance(given, Tensor):
        return None
    if call.name == "softmax":
        dim = call.kwargs.get("dim", next(iter(call.args[1:]), None))
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
        return _of_one(call._replace(), name, first)
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
    logits = known.logits.then(torch.neg) if known.logits is not None else None
    return LogVersion(known.rest, known.exact.then(lambda tensor: number - tensor), known.log, logits)


def _summed(call: Call, name: str, known: LogVersion) -> LogVersion | None:
    """A sum, or a mean, over some dimensions."""
    if "dtype" in call.kwargs or "axis" in call.kwargs:
        return None
    dims = call.kwargs.get("dim", next(iter(call.args[1:]), None))
    keeps = bool(call.kwargs.get("keepdim", next(iter(call.args[2:]), False)))

    def summed(log: Tensor) -> Tensor:
        over = tuple(range(log.dim())) if dims is None else dims
        total = torch.logsumexp(log, over, keeps)
        return total - math.log(log.numel() / total.numel()) if name == "mean" else total

    return LogVersion(known.log.then(summed), known.exact.then(lambda t: call._replace(args=(t, *call.args[1:]))()))


def _chosen(condition: Any, one: LogVersion, other: LogVersion) -> LogVersion:
    def of(a: Later, b: Later) -> Later:
        return Later(lambda: torch.where(condition, a(), b()))

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


_CROSS_ENTROPY = "binary_cross_entropy"
_LIKELIHOOD = "nll_loss"
_BASES = {"log": 1.0, "log2": math.log(2.0), "log10": math.log(10.0)}
#: Ops that a probability may pass through before its logarithm is taken.
_PASSES = frozenset(
    {
        *("gather", "index", "index_select", "masked_select", "take", "select", "slice", "view", "_unsafe_view"),
        *("clone", "alias", "detach", "copy", "_to_copy", "repeat", "flip", "roll", "cat", "stack", "where"),
        *("clamp", "clamp_min", "clamp_max", "add", "sub", "rsub", "mul", "div", "sum", "mean", "amax", "amin"),
    }
)
#: Ops that only keep it from zero, and those that leave it what it is.
_GUARDS = frozenset({"clamp", "clamp_min", "clamp_max", "add", "_to_copy", "clone", "view"})
_SAME = frozenset({"_to_copy", "clone", "view"})
#: What makes one, by op: the function that code calls, and the form.
_MADE_BY = {
    "_softmax": ("softmax", Form.LOG_SOFTMAX),
    "sigmoid": ("sigmoid", Form.LOGSIGMOID),
    "exp": ("exp", Form.LOGSUMEXP),
}


class FromLogits(CallForm):
    """A call of something with a known logarithm, or of a sigmoid, that is made on what that was computed from.

    Attributes:
        made_by: The function with which it begins.
        made_at: The line that calls that.

    Args:
        form: How it is named in the trace.
        calls: Which calls.
        made_by: The function with which it begins.
        made_at: The line that calls that.
    """

    def __init__(self, form: Form, calls: frozenset[str], made_by: str, made_at: CallPlace) -> None:
        super().__init__(calls, argument=0)
        self.form = form  # type: ignore[misc]  # one class for all forms that are made alike
        self.made_by = made_by
        self.made_at = made_at
        self._known: Followed[LogVersion] = Followed()

    def follows(self, call: Call, place: Callable[[], Place]) -> bool:
        """See `CallForm.follows`."""
        name = call.name.removeprefix("special_").replace("expit", "sigmoid").rstrip("_")
        return (name == self.made_by and self.made_at.is_at(place())) or self._known.reads(call)

    def saw(self, call: Call, result: Any) -> Iterable[Compared]:
        """See `CallForm.saw`."""
        known = log_after(call, self._known.items(call))
        known = known or (log_begun(call) if call.name == self.made_by else None)
        if known is not None:
            self._known.note(result, known)
        return ()

    def release(self) -> None:
        """See `CallForm.release`."""
        self._known.clear()

    def instead(self, call: Call) -> Any:
        """See `CallForm.instead`."""
        known = self._known.of(call.operands[0]) if call.operands else None
        if known is None:
            return NotImplemented
        if call.name == _CROSS_ENTROPY:
            if known.logits is None:
                return NotImplemented
            return functional.binary_cross_entropy_with_logits(known.logits(), *call.args[1:], **call.kwargs)
        log = known.log()
        return log if call.name == "log" else log / _BASES[call.name]

    def compared(self, call: Call, result: Any) -> Iterable[Compared]:
        """See `CallForm.compared`: what the code means is known better than it was computed.

        Where its operand is rounded by one unit of eps, a logarithm moves by eps, however small it is.
        """
        known = self._known.of(call.operands[0])
        targets = [each.double() if isinstance(each, Tensor) else each for each in call.args[1:]]
        exact = call._replace(args=(known.exact(), *targets))() if known is not None else None
        return (Compared(call(), result, exact, least=1.0),)


class CrossEntropy(FromLogits):
    """A ``cross_entropy`` of the logits for ``nll_loss`` of the logarithm of their softmax over the classes.

    Args:
        made_at: The line that calls the softmax.
    """

    def __init__(self, made_at: CallPlace) -> None:
        super().__init__(Form.CROSS_ENTROPY, frozenset({_LIKELIHOOD}), "softmax", made_at)
        self._logs: Followed[LogVersion] = Followed()

    def saw(self, call: Call, result: Any) -> Iterable[Compared]:
        """See `CallForm.saw`."""
        known = self._known.of(call.operands[0]) if call.operands and call.name == "log" else None
        if known is not None:
            self._logs.note(result, known)
            return ()
        return super().saw(call, result)

    def release(self) -> None:
        """See `CallForm.release`."""
        super().release()
        self._logs.clear()

    def instead(self, call: Call) -> Any:
        """See `CallForm.instead`."""
        known = self._logs.of(call.operands[0]) if call.operands else None
        if known is None or known.scores is None:
            return NotImplemented
        return functional.cross_entropy(known.scores(), *call.args[1:], **call.kwargs)

    def compared(self, call: Call, result: Any) -> Iterable[Compared]:
        """See `CallForm.compared`."""
        known = self._logs.of(call.operands[0])
        if known is None:
            return ()
        wide = [
            each.double() if isinstance(each, Tensor) and each.is_floating_point() else each for each in call.args[1:]
        ]
        named = {
            name: each.double() if name == "weight" and each is not None else each for name, each in call.kwargs.items()
        }
        return (Compared(call(), result, call._replace(args=(known.exact().log(), *wide), kwargs=named)(), least=1.0),)


def of_likelihood(call: FailedCall) -> Iterator[CallForm]:
    """A negative log-likelihood of the logarithm of a softmax, from the logits."""
    if call.name != "log":
        return
    loss = next(
        (each for each in ops_after(call, call.seq, _SAME) if name_of_op(call, each).startswith(_LIKELIHOOD)), None
    )
    softmax = next((each for each in ops_before(call, call.seq, _GUARDS) if name_of_op(call, each) == "_softmax"), None)
    if loss is None or softmax is None:
        return
    shape = next(iter(call.graph.site(softmax).out_shapes), "")
    dim = call.graph.scalars(softmax).get("dim")
    if dim in (1, 1 - len(shape.split("x"))):
        found = CrossEntropy(place_of_op(call, softmax))
        found.at = place_of_op(call, loss)
        yield found


def of_logarithm(call: FailedCall) -> Iterator[CallForm]:
    """The logarithm of a softmax, a sigmoid or a sum of exponentials, in one."""
    if call.name in LOGARITHMS:
        yield from _made(call, call.seq)
    elif call.name in ("exp", "sum", "div") and not call.in_backward:
        found = (each for each in ops_after(call, call.seq, _PASSES) if name_of_op(call, each) in LOGARITHMS)
        yield from _made(call, next(found, call.seq))


def of_cross_entropy(call: FailedCall) -> Iterator[CallForm]:
    """A binary cross-entropy of a sigmoid, from the logits."""
    if call.name != _CROSS_ENTROPY:
        return
    for seq in ops_before(call, call.seq, _PASSES):
        if name_of_op(call, seq) == "sigmoid":
            yield FromLogits(Form.WITH_LOGITS, frozenset({_CROSS_ENTROPY}), "sigmoid", place_of_op(call, seq))
            return


def _made(call: FailedCall, logarithm: int) -> Iterator[CallForm]:
    """The form of a logarithm whose operand is known to have one."""
    if name_of_op(call, logarithm) not in LOGARITHMS:
        return
    for seq in ops_before(call, logarithm, _PASSES):
        if name_of_op(call, seq) not in _MADE_BY:
            continue
        function, form = _MADE_BY[name_of_op(call, seq)]
        shared = any(name_of_op(call, each) == "div" for each in ops_after(call, seq, frozenset({"sum"})))
        form = Form.LOG_SOFTMAX if function == "exp" and shared else form
        found = FromLogits(form, LOGARITHMS, function, place_of_op(call, seq))
        found.at = place_of_op(call, logarithm)
        yield found
        return


_PASSED_BY_EXPONENTIALS = frozenset({"_to_copy", "mul", "add", "clamp", "clamp_min", "where", "masked_fill"})
_FAILING_EXPONENTIALS = frozenset({"exp", "exp2", "sum", "div"})


class _AsWritten(NamedTuple):
    """The values that a tensor would have without the change."""

    before: Tensor
    exact: Tensor  #: in float64


class MaxOff(CallForm):
    """``exp(x - x.max())`` for ``exp(x)``; good values are compared where it has been divided by its sum.

    Args:
        dims: Over which it is summed; None for all.
        beside: The number that the sum is added to or kept above, with which the quotient is another one.
    """

    form = Form.MAX_OFF

    def __init__(self, dims: tuple[int, ...] | None, beside: float | None = None) -> None:
        super().__init__(frozenset({"exp", "exp2"}), argument=0, was=beside)
        self._dims = dims
        self._known: Followed[_AsWritten] = Followed()
        self._condition: Tensor | float = 1.0

    def release(self) -> None:
        """See `CallForm.release`."""
        self._known.clear()

    def instead(self, call: Call) -> Any:
        """See `CallForm.instead`."""
        given = call.operands[0]
        if not isinstance(given, Tensor):
            return NotImplemented
        dims = tuple(range(given.dim())) if self._dims is None else self._dims
        largest = given.detach().amax(dims, keepdim=True)
        return call.with_operand(0, given - torch.where(largest.isfinite(), largest, torch.zeros_like(largest)))()

    def compared(self, call: Call, result: Any) -> Iterable[Compared]:
        """See `CallForm.compared`: it gives another multiple of what it gave; that is seen to later.

        Where its operand is rounded by one unit of eps, an exponential moves by as many as the operand is large.
        """
        self._condition = call.operands[0].abs().nan_to_num(posinf=0.0).amax().clamp_min(1.0).double()
        exact = call.with_operand(0, call.operands[0].double())()
        self._known.note(result, _AsWritten(call(), exact))
        return ()

    def follows(self, call: Call, place: Callable[[], Place]) -> bool:
        """See `CallForm.follows`."""
        return self._known.reads(call)

    def saw(self, call: Call, result: Any) -> Iterable[Compared]:
        """See `CallForm.saw`."""
        as_written = [known.before if (known := self._known.of(each)) is not None else each for each in call.args]
        exact = [known.exact if (known := self._known.of(each)) is not None else each for each in call.args]
        if isinstance(result, Tensor) and call.name != "backward":
            was, meant = call._replace(args=tuple(as_written))(), call._replace(args=tuple(exact))()
            if call.name == "div":
                return (Compared(was, result, meant, condition=self._condition),)
            self._known.note(result, _AsWritten(was, meant))
        return ()


def of_quotient(call: FailedCall) -> Iterator[CallForm]:
    """The maximum taken off what is exponentiated, summed and divided by that sum."""
    if call.name not in _FAILING_EXPONENTIALS or call.in_backward:
        return
    exponential = next((seq for seq in _itself_and_before(call) if name_of_op(call, seq) in ("exp", "exp2")), None)
    if exponential is None:
        return
    total = next(
        (seq for seq in ops_after(call, exponential, _PASSED_BY_EXPONENTIALS) if name_of_op(call, seq) == "sum"), None
    )
    if total is None or not _divides(call, exponential, total):
        return
    dims = call.graph.scalars(total).get("dim")
    form = MaxOff(tuple(dims) if isinstance(dims, list) else None, _beside(call, total))
    form.at = place_of_op(call, exponential)
    yield form


def _beside(call: FailedCall, total: int) -> float | None:
    """The number that a sum is added to, or kept above, on its way to the quotient; None where there is none."""
    bounds = (
        seq
        for seq in ops_after(call, total, _PASSED_BY_EXPONENTIALS - {"mul"})
        if name_of_op(call, seq) in ("add", "clamp", "clamp_min")
    )
    given = (call.graph.scalars(seq).get(key) for seq in bounds for key in ("other", "min"))
    return next((float(each) for each in given if isinstance(each, (int, float)) and each), None)


def _itself_and_before(call: FailedCall) -> Iterator[int]:
    yield call.seq
    yield from ops_before(call, call.seq, _PASSED_BY_EXPONENTIALS | {"sum", "div"})


def _divides(call: FailedCall, exponential: int, total: int) -> bool:
    """Whether what comes of the exponential is divided by what comes of its sum."""
    parts = {exponential, *ops_after(call, exponential, _PASSED_BY_EXPONENTIALS)}
    sums = {total, *ops_after(call, total, _PASSED_BY_EXPONENTIALS)}
    for seq in ops_after(call, total, _PASSED_BY_EXPONENTIALS):
        if name_of_op(call, seq) == "div":
            operands = {edge.arg: edge.from_seq for edge in call.graph.inputs[seq]}
            if operands.get(0) in parts - sums and operands.get(1) in sums:
                return True
    return False
