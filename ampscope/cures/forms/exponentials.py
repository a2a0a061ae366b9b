"""Exponentials that are divided by their sum are taken of what the maximum was subtracted from."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ampscope.cures.call_form import Call, CallForm, CallingLine, ComparedValues
from ampscope.cures.cure_form import CureForm, TrialTurn
from ampscope.cures.failed_op import FailedOp
from ampscope.cures.forms import logarithms
from ampscope.cures.rewriting.found_call import Asked, TorchCall, as_call, first_of, found_calls
from ampscope.cures.rewriting.names import is_number
from ampscope.cures.rewriting.statement import Splice, Statement, is_plain, same
from ampscope.numerals import number
from ampscope.trace.schema import Form

if TYPE_CHECKING:
    from torch import Tensor

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
        self._condition: Tensor | float = 1.0

    def instead(self, call: Call) -> object:
        """See `CallForm.instead`."""
        import torch

        given = call.tensor()
        if given is None:
            return NotImplemented
        dims = tuple(range(given.dim())) if self._dims is None else self._dims
        largest = given.detach().amax(dims, keepdim=True)
        return call.with_operand(0, given - torch.where(largest.isfinite(), largest, torch.zeros_like(largest)))()

    def compared(self, call: Call, result: object) -> Iterable[ComparedValues]:
        """See `CallForm.compared`: it gives another multiple of what it gave; that is seen to later.

        Where its operand is rounded by one unit of eps, an exponential moves by as many as the operand is large.
        """
        self._condition = call.operands[0].abs().nan_to_num(posinf=0.0).amax().clamp_min(1.0).double()
        exact = call.with_operand(0, call.operands[0].double())()
        self.known.note(result, _AsWritten(call(), exact))
        return ()

    def follows(self, call: Call, place: Callable[[], CallingLine]) -> bool:
        """See `CallForm.follows`."""
        return self.known.reads(call)

    def saw(self, call: Call, result: object) -> Iterable[ComparedValues]:
        """See `CallForm.saw`."""
        import torch

        as_written = [known.before if (known := self.known.of(each)) is not None else each for each in call.args]
        exact = [known.exact if (known := self.known.of(each)) is not None else each for each in call.args]
        if isinstance(result, torch.Tensor) and call.name != "backward":
            was, meant = call._replace(args=tuple(as_written))(), call._replace(args=tuple(exact))()
            if call.name == "div":
                return (ComparedValues(was, result, meant, condition=self._condition),)
            self.known.note(result, _AsWritten(was, meant))
        return ()


def of_quotient(failed: FailedOp) -> Iterator[CallForm]:
    """The maximum taken off what is exponentiated, summed and divided by that sum."""
    if failed.name not in _FAILING_EXPONENTIALS or failed.in_backward:
        return
    exponential = next((seq for seq in _itself_and_before(failed) if failed.name_of(seq) in ("exp", "exp2")), None)
    if exponential is None:
        return
    total = next(
        (seq for seq in failed.after(exponential, _PASSED_BY_EXPONENTIALS) if failed.name_of(seq) == "sum"), None
    )
    if total is None or not _divides(failed, exponential, total):
        return
    dims = failed.graph.scalars(total).get("dim")
    form = MaxOff(tuple(dims) if isinstance(dims, list) else None, _beside(failed, total))
    form.at = failed.place_of(exponential)
    yield form


def _beside(failed: FailedOp, total: int) -> float | None:
    """The number that a sum is added to, or kept above, on its way to the quotient; None where there is none."""
    bounds = (
        seq
        for seq in failed.after(total, _PASSED_BY_EXPONENTIALS - {"mul"})
        if failed.name_of(seq) in ("add", "clamp", "clamp_min")
    )
    given = (failed.graph.scalars(seq).get(key) for seq in bounds for key in ("other", "min"))
    return next((float(each) for each in given if isinstance(each, (int, float)) and each), None)


def _itself_and_before(failed: FailedOp) -> Iterator[int]:
    yield failed.seq
    yield from failed.before(failed.seq, _PASSED_BY_EXPONENTIALS | {"sum", "div"})


def _divides(failed: FailedOp, exponential: int, total: int) -> bool:
    """Whether what comes of the exponential is divided by what comes of its sum."""
    parts = {exponential, *failed.after(exponential, _PASSED_BY_EXPONENTIALS)}
    sums = {total, *failed.after(total, _PASSED_BY_EXPONENTIALS)}
    for seq in failed.after(total, _PASSED_BY_EXPONENTIALS):
        if failed.name_of(seq) == "div":
            operands = {edge.arg: edge.from_seq for edge in failed.graph.inputs[seq]}
            if operands.get(0) in parts - sums and operands.get(1) in sums:
                return True
    return False


def _write(statement: Statement, _: Asked) -> Sequence[Splice]:
    """``exp(x) / exp(x).sum(-1)``: the largest of each row is taken off before; it cancels out in the quotient."""
    totals = [each for node in statement.nodes() if (each := _divisor(node)) is not None]
    hows = {", ".join([*map(statement.text, each.operands[1:2]), *_dims(statement, each)]) for each in totals}
    raised = found_calls(statement, "exp")
    of = [first_of(each) for each in raised]
    if len(hows) != 1 or not all(each is not None and of[0] is not None and same(each, of[0]) for each in of):
        return ()  # what is taken off one and not another does not cancel out
    (how,) = hows
    return [splice for each in raised for splice in _less_its_largest(statement, each, how)]


def _divisor(node: ast.AST) -> TorchCall | None:
    """The sum of exponentials by which a part divides, with nothing added to it."""
    quotient = as_call(node, "div")
    total = as_call(quotient.operand(1), "sum") if quotient is not None else None
    return total if as_call(first_of(total), "exp") is not None else None


def _dims(statement: Statement, total: TorchCall) -> list[str]:
    return [statement.text(total.keywords["dim"])] if "dim" in total.keywords else []


def _less_its_largest(statement: Statement, found: TorchCall, how: str) -> Sequence[Splice]:
    operand = first_of(found)
    if operand is None or not is_plain(operand) or is_number(operand):
        return ()
    largest = f"amax({how}, keepdim=True)" if how else "max()"
    less = f"{statement.summand(operand)} - {statement.atom(operand)}.{largest}"
    return [found.with_operand(statement, operand, f"({less})" if found.is_method else less)]


def _sentence(asked: Asked) -> str:
    advice = f"Subtract the maximum from the operand of {asked.call}"
    if asked.was is None:
        return f"{advice}: divided by their sum, the results are the same."
    return (
        f"{advice}. Divided by their sum, the results are the same, except where the {number(asked.was)} added to a "
        "small sum made them smaller."
    )


FORMS = (
    CureForm(
        form=Form.MAX_OFF,
        tried=lambda asked: f"the maximum subtracted from the operand of {asked.call}",
        sentence=_sentence,
        code=lambda asked: f"e = torch.{asked.call}(x - x.amax(-1, keepdim=True))  # or the whole as x.softmax(-1)",
        turn=TrialTurn.AS_MEANT,
        rules=(of_quotient,),
        speaks_for=logarithms.ALIKE,
        depends=True,
        rewriting=_write,
    ),
)
