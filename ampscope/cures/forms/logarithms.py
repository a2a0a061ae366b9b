"""Logarithms of a softmax, a sigmoid or a sum of exponentials, and losses of these, are computed from the logits."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ampscope.cures.call_form import Call, CallForm, CallingLine, CallPlace, ComparedValues, Written, calls_of
from ampscope.cures.cure_form import CureForm, TrialTurn
from ampscope.cures.failed_op import FailedOp
from ampscope.cures.forms.log_versions import LogVersion, log_after, log_begun
from ampscope.cures.rewriting.found_call import Asked, TorchCall, as_call, first_of, found_call, found_calls
from ampscope.cures.rewriting.literals import value_of
from ampscope.cures.rewriting.program.earlier_value import EXPONENTIALS, WrittenOut, values_written_out, written_out
from ampscope.cures.rewriting.source_file import HasPlace
from ampscope.cures.rewriting.statement import Splice, Statement, same
from ampscope.trace.schema import Form, said

_CROSS_ENTROPY = "binary_cross_entropy"
_LIKELIHOOD = "nll_loss"
_BASES = {"log": 1.0, "log2": math.log(2.0), "log10": math.log(10.0)}
LOGARITHMS = frozenset(_BASES)
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

    Args:
        form: How it is named in the trace.
        calls: Which calls.
        made_by: The function with which it begins.
        made_at: The line that calls that.
    """

    live_as = "from_logits"
    in_loss_alone = True
    made_at: CallPlace

    def __init__(self, form: Form, calls: frozenset[str], made_by: str, made_at: CallPlace) -> None:
        super().__init__(calls, argument=0)
        self.form = form  # type: ignore[misc]  # one class for all forms that are made alike
        self.made_by = made_by
        self.made_at = made_at

    def follows(self, call: Call, place: Callable[[], CallingLine]) -> bool:
        """See `CallForm.follows`."""
        name = call.name.removeprefix("special_").replace("expit", "sigmoid").rstrip("_")
        return (name == self.made_by and self.made_at.is_at(place())) or self.known.reads(call)

    def saw(self, call: Call, result: object) -> Iterable[ComparedValues]:
        """See `CallForm.saw`."""
        known = log_after(call, [each if isinstance(each, LogVersion) else None for each in self.known.items(call)])
        known = known or (log_begun(call) if call.name == self.made_by else None)
        if known is not None:
            self.known.note(result, known)
        return ()

    def instead(self, call: Call) -> object:
        """See `CallForm.instead`."""
        known = self._given(call)
        if known is None:
            return NotImplemented
        if call.name == _CROSS_ENTROPY:
            return _with_logits(call, known)
        log = known.log()
        return log if call.name == "log" else log / _BASES[call.name]

    def _given(self, call: Call) -> Any:
        """Collects what is known of the operands of a call."""
        return self.known.of(call.operands[0]) if call.operands else None

    def compared(self, call: Call, result: object) -> Iterable[ComparedValues]:
        """See `CallForm.compared`: what the code means is known better than it was computed.

        Where its operand is rounded by one unit of eps, a logarithm moves by eps, however small it is.
        """
        known = self._given(call)
        exact = call._replace(args=(known.exact(), *map(_widened, call.args[1:])))() if known is not None else None
        return (ComparedValues(call(), result, exact, least=1.0),)

    @property
    def told(self) -> str:
        """See `CallForm.told`."""
        return f"{self.form} instead of {'the logarithm' if self.calls == LOGARITHMS else self.asked}"

    def written(self) -> Written:
        """See `CallForm.written`."""
        made = {"made_by": self.made_by, "made_file": self.made_at.file, "made_line": self.made_at.line}
        return {**super().written(), "form": self.form, **made}

    @classmethod
    def read(cls, written: Written, at: CallPlace) -> CallForm:
        """See `CallForm.read`."""
        form = said(Form, str(written.get("form", "")), Form.LOG_SOFTMAX)
        return FromLogits(form, calls_of(written), str(written.get("made_by", "")), _made_at(written))


def _made_at(written: Written) -> CallPlace:
    return CallPlace(str(written.get("made_file", "")), int(written.get("made_line", 0)))


def _with_logits(call: Call, known: LogVersion) -> object:
    from torch.nn import functional

    if known.logits is None:
        return NotImplemented
    return functional.binary_cross_entropy_with_logits(known.logits(), *call.args[1:], **call.kwargs)


def _widened(value: object) -> object:
    """A tensor of real numbers in float64; any other value as it is."""
    import torch

    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class _Logarithm(NamedTuple):
    """Says of what a tensor is the logarithm."""

    of: LogVersion


class CrossEntropy(FromLogits):
    """A ``cross_entropy`` of the logits for ``nll_loss`` of the logarithm of their softmax over the classes.

    Args:
        made_at: The line that calls the softmax.
    """

    live_as = "cross_entropy"

    def __init__(self, made_at: CallPlace) -> None:
        super().__init__(Form.CROSS_ENTROPY, frozenset({_LIKELIHOOD}), "softmax", made_at)

    def saw(self, call: Call, result: object) -> Iterable[ComparedValues]:
        """See `CallForm.saw`."""
        known = self._given(call) if call.name == "log" else None
        if isinstance(known, LogVersion):
            self.known.note(result, _Logarithm(known))
            return ()
        return super().saw(call, result)

    def instead(self, call: Call) -> object:
        """See `CallForm.instead`."""
        from torch.nn import functional

        known = self._given(call)
        if not isinstance(known, _Logarithm) or known.of.scores is None:
            return NotImplemented
        return functional.cross_entropy(known.of.scores(), *call.args[1:], **call.kwargs)

    def compared(self, call: Call, result: object) -> Iterable[ComparedValues]:
        """See `CallForm.compared`."""
        known = self._given(call)
        if not isinstance(known, _Logarithm):
            return ()
        named = {name: _widened(each) for name, each in call.kwargs.items()}
        exact = call._replace(args=(known.of.exact().log(), *map(_widened, call.args[1:])), kwargs=named)()
        return (ComparedValues(call(), result, exact, least=1.0),)

    @classmethod
    def read(cls, written: Written, at: CallPlace) -> CallForm:
        """See `CallForm.read`."""
        return CrossEntropy(_made_at(written))


def of_likelihood(failed: FailedOp) -> Iterator[CallForm]:
    """A negative log-likelihood of the logarithm of a softmax, from the logits."""
    if failed.name != "log":
        return
    loss = next(
        (each for each in failed.after(failed.seq, _SAME) if failed.name_of(each).startswith(_LIKELIHOOD)), None
    )
    softmax = next((each for each in failed.before(failed.seq, _GUARDS) if failed.name_of(each) == "_softmax"), None)
    if loss is None or softmax is None:
        return
    shape = next(iter(failed.graph.site(softmax).out_shapes), "")
    dim = failed.graph.scalars(softmax).get("dim")
    if dim in (1, 1 - len(shape.split("x"))):
        found = CrossEntropy(failed.place_of(softmax))
        found.at = failed.place_of(loss)
        yield found


def of_logarithm(failed: FailedOp) -> Iterator[CallForm]:
    """The logarithm of a softmax, a sigmoid or a sum of exponentials, in one."""
    if failed.name in LOGARITHMS:
        yield from _made(failed, failed.seq)
    elif failed.name in ("exp", "sum", "div") and not failed.in_backward:
        found = (each for each in failed.after(failed.seq, _PASSES) if failed.name_of(each) in LOGARITHMS)
        yield from _made(failed, next(found, failed.seq))


def of_cross_entropy(failed: FailedOp) -> Iterator[CallForm]:
    """A binary cross-entropy of a sigmoid, from the logits."""
    if failed.name != _CROSS_ENTROPY:
        return
    for seq in failed.before(failed.seq, _PASSES):
        if failed.name_of(seq) == "sigmoid":
            yield FromLogits(Form.WITH_LOGITS, frozenset({_CROSS_ENTROPY}), "sigmoid", failed.place_of(seq))
            return


def _made(failed: FailedOp, logarithm: int) -> Iterator[CallForm]:
    """The form of a logarithm whose operand is known to have one."""
    if failed.name_of(logarithm) not in LOGARITHMS:
        return
    for seq in failed.before(logarithm, _PASSES):
        if failed.name_of(seq) not in _MADE_BY:
            continue
        function, form = _MADE_BY[failed.name_of(seq)]
        shared = any(failed.name_of(each) == "div" for each in failed.after(seq, frozenset({"sum"})))
        form = Form.LOG_SOFTMAX if function == "exp" and shared else form
        found = FromLogits(form, LOGARITHMS, function, failed.place_of(seq))
        found.at = failed.place_of(logarithm)
        yield found
        return


# -- in the user's statement -------------------------------------------------------------------------------------------

#: Methods that pick one element of each row, in the order of the rows.
_PICKS = frozenset({"diagonal", "diag"})


def _by_hand(statement: Statement, logarithm: TorchCall) -> str:
    """``log(exp(x).diagonal() / exp(x).sum(dim=1))`` as ``x.log_softmax(dim=1).diagonal()``; empty for another one."""
    quotient = as_call(logarithm.operand(0), "div")
    part, total = (quotient.operand(0), as_call(quotient.operand(1), "sum")) if quotient is not None else (None, None)
    raised = as_call(total.operand(0), "exp") if total is not None else None
    given = raised.operand(0) if raised is not None else None
    dim = _dim(statement, total) if total is not None else ""
    if part is None or total is None or given is None or not dim:
        return ""
    picked = _picked(part)
    inner = as_call(picked, "exp")
    operand = inner.operand(0) if inner is not None else None
    kept = total.keywords.get("keepdim")
    keeps = kept is not None and isinstance(kept.value, ast.Constant) and kept.value.value is True
    if inner is None or operand is None or not same(operand, given) or keeps is not (picked is part):
        return ""  # what is picked over sums that keep their dimension, or all over sums that do not, is broadcast
    assert isinstance(inner.node, ast.expr)
    return statement.text_with(part, statement.instead(inner.node, f"{statement.atom(operand)}.log_softmax({dim})"))


def _dim(statement: Statement, total: TorchCall) -> str:
    """The dimension that is summed over, as it is given; empty where that is all of them, or more is asked."""
    if not {"dim", "keepdim"}.issuperset(total.keywords) or len(total.operands) > 2:
        return ""
    if len(total.operands) == 2:
        return statement.text(total.operands[1])
    return statement.text(total.keywords["dim"]) if "dim" in total.keywords else ""


def _picked(part: ast.expr) -> ast.expr:
    """Returns the part from which ``diagonal`` picks elements; the part itself, where it picks none."""
    is_pick = isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in _PICKS
    if is_pick and isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and not part.args:
        return part.func.value
    return part


_LOG = "log"
_FUNCTIONAL = "torch.nn.functional"


def _write_log_softmax(statement: Statement, _: Asked) -> Sequence[Splice]:
    """``torch.log(x.softmax(-1))`` becomes ``x.log_softmax(-1)``."""
    return _all_replaced(statement, [(each, _log_softmax_of(statement, each)) for each in found_calls(statement, _LOG)])


def _log_softmax_of(statement: Statement, logarithm: TorchCall) -> str:
    inner = as_call(_unguarded(first_of(logarithm)), "softmax")
    return _renamed(statement, inner, "log_softmax") if inner else _by_hand(statement, logarithm)


def _write_logsigmoid(statement: Statement, _: Asked) -> Sequence[Splice]:
    """``torch.log(torch.sigmoid(x))`` becomes ``F.logsigmoid(x)``, that of ``1 - sigmoid(x)`` that of ``-x``."""
    found = [(each, _sigmoid_in(statement, each)) for each in found_calls(statement, _LOG)]
    name = statement.spelled(f"{_FUNCTIONAL}.logsigmoid")
    return _all_replaced(statement, [(each, f"{name}({given})" if given else "") for each, given in found])


def _sigmoid_in(statement: Statement, logarithm: TorchCall) -> str:
    """Returns what a sigmoid in a logarithm is given, negated for ``1 - sigmoid(x)``; empty where there is none."""
    operand = _unguarded(first_of(logarithm))
    rest = _taken_from_one(operand)
    given = first_of(as_call(rest if rest is not None else operand, "sigmoid"))
    if given is None:
        return ""
    return statement.text(given) if rest is None else f"-{statement.atom(given)}"


def _write_with_logits(statement: Statement, _: Asked) -> Sequence[Splice]:
    """``binary_cross_entropy(sigmoid(x), y)`` becomes ``binary_cross_entropy_with_logits(x, y)``."""
    loss = found_call(statement, "binary_cross_entropy")
    inner = as_call(_unguarded(first_of(loss)), "sigmoid")
    given, probability = first_of(inner), first_of(loss)
    if loss is None or given is None or probability is None or loss.is_method:
        return ()
    name = _name(statement, loss, "binary_cross_entropy_with_logits")
    return [name, statement.instead(probability, statement.text(given))]


def _write_cross_entropy(statement: Statement, _: Asked) -> Sequence[Splice]:
    """``nll_loss(log(softmax(x, dim=1)), y)`` becomes ``cross_entropy(x, y)``."""
    loss = found_call(statement, "nll_loss")
    logarithm = as_call(first_of(loss), _LOG)
    inner = as_call(_unguarded(first_of(logarithm)), "softmax")
    given, logs = first_of(inner), first_of(loss)
    if loss is None or logarithm is None or inner is None or given is None or logs is None or loss.is_method:
        return ()
    dim = inner.argument(1, "dim")
    if dim is None or value_of(dim) != 1.0:  # over another one it is not what nll_loss reads
        return [_replaced(statement, logarithm, _renamed(statement, inner, "log_softmax"))]
    return [_name(statement, loss, "cross_entropy"), statement.instead(logs, statement.text(given))]


def _write_logsumexp(statement: Statement, _: Asked) -> Sequence[Splice]:
    """``x.exp().sum(-1).log()`` becomes ``x.logsumexp(-1)``."""
    found = [(each, _sum_in(statement, each)) for each in found_calls(statement, _LOG)]
    return [_replaced(statement, each, text) for each, text in found if text]


def _sum_in(statement: Statement, logarithm: TorchCall) -> str:
    """The logarithm of a sum of exponentials in one call; empty where it is of something else."""
    total = as_call(first_of(logarithm), "sum")
    given = first_of(as_call(first_of(total), "exp"))
    if total is None or given is None or not {"dim", "keepdim"}.issuperset(total.keywords):
        return ""
    rest = [*(statement.text(each) for each in total.operands[1:]), *map(statement.text, total.keywords.values())]
    tensor = statement.atom(given)
    return f"{tensor}.logsumexp({', '.join(rest)})" if rest else f"{tensor}.flatten().logsumexp(0)"


def _unguarded(node: ast.expr | None) -> ast.AST:
    """A part without the small number that keeps it from zero: the better form needs none."""
    clamp = as_call(node, "clamp", "clip", "clamp_min", "add") if node is not None else None
    if clamp is not None and not clamp.is_operator:
        return clamp.operands[0]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        small = [abs(value_of(end) or 1.0) < 1e-2 for end in (node.left, node.right)]
        if any(small):
            return node.left if small[1] else node.right
    return node if node is not None else ast.Pass()


def _taken_from_one(node: ast.AST) -> ast.AST | None:
    is_rest = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and value_of(node.left) == 1.0
    return node.right if is_rest and isinstance(node, ast.BinOp) else None


def _all_replaced(statement: Statement, texts: Sequence[tuple[TorchCall, str]]) -> Sequence[Splice]:
    """Calls by other ones; none where one has no other: it may be the one that is meant."""
    return [_replaced(statement, *each) for each in texts] if all(text for _, text in texts) else ()


def _replaced(statement: Statement, found: TorchCall, text: str) -> Splice:
    assert isinstance(found.node, ast.expr)
    return statement.instead(found.node, text)


def _renamed(statement: Statement, found: TorchCall, name: str) -> str:
    assert isinstance(found.node, ast.Call)
    return statement.text_with(found.node, _name(statement, found, name))


def _name(statement: Statement, found: TorchCall, name: str) -> Splice:
    """Another function's name in the place of a call's, of the same module or class; of a bare name the whole of it."""
    assert isinstance(found.node, ast.Call)
    function = found.node.func
    if isinstance(function, ast.Name):
        return statement.instead(function, statement.spelled(f"{_FUNCTIONAL}.{name}"))
    end = statement.span(function)[1]
    return Splice(end - len(found.name.encode()), end, name)


def _with_values(parsed: Statement, place: HasPlace, asked: Asked) -> WrittenOut | None:
    return written_out(parsed, place, asked.name)


def _with_quotients(parsed: Statement, place: HasPlace, asked: Asked) -> WrittenOut | None:
    return _with_values(parsed, place, asked) or values_written_out(parsed, place, EXPONENTIALS)


#: Beside them `exponentials.MAX_OFF`.
ALIKE = frozenset(
    {Form.LOG_SOFTMAX, Form.LOGSIGMOID, Form.WITH_LOGITS, Form.CROSS_ENTROPY, Form.LOGSUMEXP, Form.MAX_OFF}
)


def _instead(form: Form, other: str, made_of: str) -> CureForm:
    """A form that calls another function on what the call's operand was made of."""
    return CureForm(
        form=form,
        tried=lambda asked: f"{other} instead of {asked.call} of {made_of}",
        sentence=lambda asked: f"Use {other} instead of {asked.call} of {made_of}.",
        turn=TrialTurn.AS_MEANT,
        speaks_for=ALIKE,
    )


FORMS = (
    replace(
        _instead(Form.CROSS_ENTROPY, "cross_entropy of the logits", "the logarithm of their softmax"),
        code=lambda _: "loss = F.cross_entropy(logits, target)",
        rules=(of_likelihood,),
        live=(CrossEntropy,),
        rewriting=_write_cross_entropy,
        values=_with_values,
    ),
    replace(
        _instead(Form.LOG_SOFTMAX, "log_softmax of the logits", "their softmax"),
        code=lambda _: "log_p = F.log_softmax(logits, dim=-1)  # or F.cross_entropy(logits, target)",
        rules=(of_logarithm,),
        live=(FromLogits,),
        rewriting=_write_log_softmax,
        values=_with_quotients,
    ),
    replace(
        _instead(Form.LOGSIGMOID, "logsigmoid of the logits", "their sigmoid"),
        code=lambda _: "log_p, log_q = F.logsigmoid(logits), F.logsigmoid(-logits)  # q = 1 - p",
        rewriting=_write_logsigmoid,
        values=_with_values,
    ),
    replace(
        _instead(Form.LOGSUMEXP, "logsumexp", "a sum of exponentials"),
        code=lambda _: "y = torch.logsumexp(x, dim=-1)",
        rewriting=_write_logsumexp,
    ),
    replace(
        _instead(Form.WITH_LOGITS, "binary_cross_entropy_with_logits", "a sigmoid"),
        sentence=lambda asked: (
            f"Use binary_cross_entropy_with_logits of the logits instead of {asked.call} of their sigmoid."
        ),
        code=lambda _: "loss = F.binary_cross_entropy_with_logits(logits, target)",
        rules=(of_cross_entropy,),
        rewriting=_write_with_logits,
        values=_with_values,
    ),
)
