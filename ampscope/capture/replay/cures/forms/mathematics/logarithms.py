"""Logarithms of probabilities and of sums of exponentials, computed from what these were made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import functional

from ampscope.capture.replay.cures.forms.call_form import Call, CallForm, CallPlace, Compared
from ampscope.capture.replay.cures.forms.failed_call import FailedCall
from ampscope.capture.replay.cures.forms.mathematics import log_versions
from ampscope.capture.replay.cures.forms.mathematics.bounds import LOGARITHMS
from ampscope.capture.replay.cures.forms.mathematics.followed import Followed
from ampscope.capture.replay.cures.forms.mathematics.log_versions import LogVersion
from ampscope.capture.replay.cures.forms.mathematics.operands import after, before, name, place
from ampscope.capture.torch_support.user_line import Place
from ampscope.trace.schema import Form

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
        known = log_versions.after(call, self._known.items(call))
        known = known or (log_versions.begun(call) if call.name == self.made_by else None)
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
    loss = next((each for each in after(call, call.seq, _SAME) if name(call, each).startswith(_LIKELIHOOD)), None)
    softmax = next((each for each in before(call, call.seq, _GUARDS) if name(call, each) == "_softmax"), None)
    if loss is None or softmax is None:
        return
    shape = next(iter(call.graph.site(softmax).out_shapes), "")
    dim = call.graph.scalars(softmax).get("dim")
    if dim in (1, 1 - len(shape.split("x"))):
        found = CrossEntropy(place(call, softmax))
        found.at = place(call, loss)
        yield found


def of_logarithm(call: FailedCall) -> Iterator[CallForm]:
    """The logarithm of a softmax, a sigmoid or a sum of exponentials, in one."""
    if call.name in LOGARITHMS:
        yield from _made(call, call.seq)
    elif call.name in ("exp", "sum", "div") and not call.in_backward:
        found = (each for each in after(call, call.seq, _PASSES) if name(call, each) in LOGARITHMS)
        yield from _made(call, next(found, call.seq))


def of_cross_entropy(call: FailedCall) -> Iterator[CallForm]:
    """A binary cross-entropy of a sigmoid, from the logits."""
    if call.name != _CROSS_ENTROPY:
        return
    for seq in before(call, call.seq, _PASSES):
        if name(call, seq) == "sigmoid":
            yield FromLogits(Form.WITH_LOGITS, frozenset({_CROSS_ENTROPY}), "sigmoid", place(call, seq))
            return


def _made(call: FailedCall, logarithm: int) -> Iterator[CallForm]:
    """The form of a logarithm whose operand is known to have one."""
    if name(call, logarithm) not in LOGARITHMS:
        return
    for seq in before(call, logarithm, _PASSES):
        if name(call, seq) not in _MADE_BY:
            continue
        function, form = _MADE_BY[name(call, seq)]
        shared = any(name(call, each) == "div" for each in after(call, seq, frozenset({"sum"})))
        form = Form.LOG_SOFTMAX if function == "exp" and shared else form
        found = FromLogits(form, LOGARITHMS, function, place(call, seq))
        found.at = place(call, logarithm)
        yield found
        return
