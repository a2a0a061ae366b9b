"""A variance is computed of centred values, which do not cancel."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

from ampscope.cures.call_form import Call, CallForm, CallingLine, CallPlace, ComparedValues
from ampscope.cures.cure_form import CureForm, TrialTurn
from ampscope.cures.failed_op import FailedOp
from ampscope.cures.rewriting.found_call import Asked, TorchCall, as_call
from ampscope.cures.rewriting.literals import value_of
from ampscope.cures.rewriting.names import is_number
from ampscope.cures.rewriting.program.earlier_value import MEANS, values_written_out
from ampscope.cures.rewriting.statement import Splice, Statement, is_plain, same
from ampscope.trace.schema import Form

if TYPE_CHECKING:
    from torch import Tensor

#: Ops that fail on a variance that is negative or zero, and those by whose result one fails that overflows.
_READS = frozenset({"sqrt", "rsqrt", "pow", "log", "div", "reciprocal"})
_SQUARES = frozenset({"pow", "mul"})
_PASSED = frozenset({"_to_copy", "clone", "add", "mul", "clamp", "clamp_min", "sqrt"})


class _Is(Enum):
    """The relations of a tensor to the one that it was computed from."""

    SQUARE = auto()
    MEAN = auto()
    MEAN_OF_SQUARE = auto()
    SQUARE_OF_MEAN = auto()


class _Part(NamedTuple):
    kind: _Is
    of: Tensor
    along: tuple[Any, bool] = (None, False)  #: of a mean, the dimensions, and whether they are kept


_AFTER_MEAN = {None: _Is.MEAN, _Is.SQUARE: _Is.MEAN_OF_SQUARE}
_AFTER_SQUARE = {None: _Is.SQUARE, _Is.MEAN: _Is.SQUARE_OF_MEAN}


class Centred(CallForm):
    """``(x - x.mean()).square().mean()`` for ``x.square().mean() - x.mean().square()``.

    Args:
        parts: The lines that calculate the squares and the means.
    """

    form = Form.CENTRED

    def __init__(self, parts: frozenset[CallPlace]) -> None:
        super().__init__(frozenset({"sub"}))
        self._parts = parts

    def fits(self, call: Call) -> bool:
        """See `CallForm.fits`."""
        return self._variance(call) is not None

    def follows(self, call: Call, place: Callable[[], CallingLine]) -> bool:
        """See `CallForm.follows`."""
        made = call.name == "mean" or _is_square(call)
        return made and (self.known.reads(call) or any(each.is_at(place()) for each in self._parts))

    def saw(self, call: Call, result: object) -> Iterable[ComparedValues]:
        """See `CallForm.saw`."""
        given = call.tensor()
        if given is not None:
            known = self.known.of(given)
            kinds = _AFTER_MEAN if call.name == "mean" else _AFTER_SQUARE
            kind = kinds.get(known.kind if known is not None else None)
            along = _along(call) if call.name == "mean" else known.along if known is not None else (None, False)
            if kind is not None and along is not None:
                self.known.note(result, _Part(kind, known.of if known is not None else given, along))
        return ()

    def instead(self, call: Call) -> object:
        """See `CallForm.instead`."""
        part = self._variance(call)
        return NotImplemented if part is None else _centred(part.of, part)

    def good(self, before: Tensor) -> Tensor:
        """See `CallForm.good`: a variance below zero was not."""
        return before.isfinite() & (before >= 0)

    def compared(self, call: Call, result: object) -> Iterable[ComparedValues]:
        """See `CallForm.compared`: what the code means is known better than it was computed.

        Where numbers are rounded by one unit of eps, their variance moves by as many as they are larger than their
        deviation.
        """
        part = self._variance(call)
        if part is None:
            return ()
        exact = _centred(part.of.double(), part)
        larger = (_mean_along(part.of.double().square(), *part.along) / exact).sqrt()
        return (ComparedValues(call(), result, exact, condition=larger.nan_to_num(nan=1.0, posinf=1.0).clamp_min(1.0)),)

    def _variance(self, call: Call) -> _Part | None:
        """Returns the tensor of which a difference is the variance, and along what; None where none is known."""
        if len(call.operands) != 2 or call.kwargs:
            return None
        squares, mean = map(self.known.of, call.operands)
        if squares is None or mean is None or squares.of is not mean.of or squares.along != mean.along:
            return None
        return squares if (squares.kind, mean.kind) == (_Is.MEAN_OF_SQUARE, _Is.SQUARE_OF_MEAN) else None


def _is_square(call: Call) -> bool:
    """Whether a call squares one tensor."""
    if call.name == "square":
        return True
    one, other = (*call.operands[:2], None, None)[:2]
    is_power = call.name == "pow" and call.tensor(1) is None and other == 2
    return is_power or (call.name == "mul" and one is other)


def _along(call: Call) -> tuple[Any, bool] | None:
    """The dimensions of a mean, and whether they are kept; None where it is given more than that."""
    named = dict(zip(("dim", "keepdim"), call.args[1:], strict=False)) | {
        {"axis": "dim"}.get(each, each): value for each, value in call.kwargs.items()
    }
    dims = named.get("dim")
    known = named.keys() <= {"dim", "keepdim"} and len(call.args) <= 3
    return (tuple(dims) if isinstance(dims, list) else dims, bool(named.get("keepdim", False))) if known else None


def _mean_along(given: Tensor, dims: Any, keeps: bool) -> Tensor:
    return given.mean() if dims is None else given.mean(dims, keeps)


def _centred(given: Tensor, part: _Part) -> Tensor:
    dims, _ = part.along
    return _mean_along((given - _mean_along(given, dims, True)).square(), *part.along)


def of_variance(failed: FailedOp) -> Iterator[CallForm]:
    """The variance that a failed op reads, or of which it is the square, by centred squares."""
    near = failed.after(failed.seq, _PASSED | {"mean"}) if failed.name in _SQUARES else iter(())
    behind = failed.before(failed.seq, _PASSED) if failed.name in _READS else iter(())
    for seq in (*near, *behind):
        parts = _parts(failed, seq) if failed.name_of(seq) == "sub" else []
        low = failed.graph.output(seq).min
        if parts and (failed.name in _SQUARES or low is None or not low > 0):
            form = Centred(frozenset(failed.place_of(each) for each in parts))
            form.at = failed.place_of(seq)
            yield form
            return


def _parts(failed: FailedOp, difference: int) -> list[int]:
    """The squares and means of which a difference makes the variance; empty where it is something else."""
    first, second = (_reads(failed, difference, arg) for arg in (0, 1))
    if first is None or second is None or failed.name_of(first) != "mean" or not _squares(failed, second):
        return []
    square, mean = _reads(failed, first, 0), _reads(failed, second, 0)
    if square is None or mean is None or not _squares(failed, square) or failed.name_of(mean) != "mean":
        return []
    return [first, second, square, mean] if _reads(failed, square, 0) == _reads(failed, mean, 0) else []


def _reads(failed: FailedOp, seq: int, arg: int) -> int | None:
    """The op that gave an operand, before a cast."""
    found = next((edge.from_seq for edge in failed.graph.inputs[seq] if edge.arg == arg), None)
    return _reads(failed, found, 0) if found is not None and failed.name_of(found) == "_to_copy" else found


def _squares(failed: FailedOp, seq: int) -> bool:
    if failed.name_of(seq) == "pow":
        return failed.graph.scalars(seq).get("exponent") == 2
    return failed.name_of(seq) == "mul" and _reads(failed, seq, 0) == _reads(failed, seq, 1) is not None


# -- in the user's statement -------------------------------------------------------------------------------------------


def _write(statement: Statement, _: Asked) -> Sequence[Splice]:
    """``x.pow(2).mean(-1) - x.mean(-1).pow(2)`` becomes ``(x - x.mean(-1, keepdim=True)).square().mean(-1)``."""
    found = [each for node in statement.nodes() if (each := _variance_in(statement, node)) is not None]
    if len(found) != 1:
        return ()
    node, operand, how = found[0]
    once = ", ".join([*how, *([] if any(each.startswith("keepdim") for each in how) or not how else ["keepdim=True"])])
    atom = statement.atom(operand)
    text = f"({statement.text(operand)} - {atom}.mean({once})).square().mean({', '.join(how)})"
    return [statement.instead(node, text)]


def _variance_in(statement: Statement, node: ast.AST) -> tuple[ast.BinOp, ast.expr, list[str]] | None:
    """A mean of squares less the square of the mean: where, of what, and along what."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Sub):
        return None
    first, second = as_call(node.left, "mean"), as_call(_squared(node.right), "mean")
    of, again = _squared(first.operand(0) if first else None), second.operand(0) if second else None
    if first is None or second is None or of is None or again is None or not same(of, again) or not is_plain(of):
        return None
    how = _arguments(statement, first)
    if how != _arguments(statement, second):
        return None
    return node, of, how


def _arguments(statement: Statement, found: TorchCall) -> list[str]:
    return [*map(statement.text, found.operands[1:]), *map(statement.text, found.keywords.values())]


def _squared(node: ast.AST | None) -> ast.expr | None:
    call = as_call(node, "square", "pow", "mul")
    if call is None:
        return None
    first, second = call.operand(0), call.operand(1)
    if call.name == "square":
        return first
    if call.name == "pow":
        return first if second is not None and value_of(second) == 2.0 else None
    twice = first is not None and second is not None and same(first, second) and not is_number(first)
    return first if twice else None


FORMS = (
    CureForm(
        form=Form.CENTRED,
        tried=lambda _: "the variance from centred values",
        sentence=lambda _: (
            "Compute the variance from centred values: the mean of squares minus the squared mean cancels, and "
            "overflows sooner."
        ),
        code=lambda _: "var = (x - x.mean(-1, keepdim=True)).square().mean(-1)",
        turn=TrialTurn.AS_MEANT,
        rules=(of_variance,),
        rewriting=_write,
        values=lambda parsed, place, _: values_written_out(parsed, place, MEANS),
    ),
)
