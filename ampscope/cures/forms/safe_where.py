"""An operand is made safe before the op, where the op has no value or no slope."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ampscope.cures.call_form import Call, CallForm, CallPlace, Written, calls_of
from ampscope.cures.cure_form import CureForm, TrialTurn, operand
from ampscope.cures.failed_op import FailedOp
from ampscope.cures.forms.logarithms import LOGARITHMS
from ampscope.cures.rewriting.found_call import Asked, TorchCall, as_call, found_call, found_calls
from ampscope.cures.rewriting.names import is_number
from ampscope.cures.rewriting.statement import Splice, Statement, can_repeat, is_plain, same
from ampscope.trace.schema import Form

#: Ops that divide, by the operand that is the divisor.
DIVISORS = {"div": 1, "true_divide": 1, "reciprocal": 0, "rsqrt": 0}
#: Functions that code may call where such an op runs.
DIVISIONS = frozenset({"div", "reciprocal", "rsqrt"})
_SLOPES = frozenset({"sqrt", "pow"})


class SafeWhere(CallForm):
    """An op whose operand is 1 wherever the op is not defined for it.

    Attributes:
        keeps: What the op gives there stays, without a slope.

    Args:
        calls: Which functions.
        keeps: What the op gives there stays, without a slope: for what is defined there.
    """

    form = Form.SAFE_WHERE
    live_as = "safe_where"

    def __init__(self, calls: frozenset[str], *, keeps: bool) -> None:
        super().__init__(calls, argument=0, value=1.0)
        self.keeps = keeps

    def instead(self, call: Call) -> object:
        """See `CallForm.instead`."""
        import torch

        number = int(call.name == "div")
        given = call.tensor(number)
        if given is None:
            return NotImplemented
        self.argument = number
        unsafe = given == 0 if call.name in ("div", "reciprocal") else given <= 0
        result = call.with_operand(number, torch.where(unsafe, torch.ones_like(given), given))()
        return (
            torch.where(unsafe, call.with_operand(number, given.detach())().detach(), result) if self.keeps else result
        )

    @property
    def told(self) -> str:
        """See `CallForm.told`."""
        unsafe = "zero" if self.calls == DIVISIONS else "not above zero"
        return f"the operand of {self.asked} 1 where that is {unsafe}"

    def written(self) -> Written:
        """See `CallForm.written`."""
        return {**super().written(), "keeps": self.keeps}

    @classmethod
    def read(cls, written: Written, at: CallPlace) -> CallForm:
        """See `CallForm.read`."""
        return SafeWhere(calls_of(written), keeps=bool(written.get("keeps")))


def safe_where_masked(failed: FailedOp) -> Iterator[CallForm]:
    """The operand made safe before the op, where ``torch.where`` makes its result safe after it."""
    if failed.name in LOGARITHMS | DIVISORS.keys() and failed.is_masked:
        yield SafeWhere(DIVISIONS if failed.name in DIVISORS else frozenset({failed.name}), keeps=False)


def safe_where_sloped(failed: FailedOp) -> Iterator[CallForm]:
    """A root without a slope at zero, where its own is infinite."""
    if failed.name in _SLOPES and failed.in_backward:
        yield SafeWhere(frozenset({failed.name}), keeps=True)


def safe_where_divided(failed: FailedOp) -> Iterator[CallForm]:
    """A divisor of both signs that is 1 instead of 0."""
    given = failed.operand(DIVISORS[failed.name]) if failed.name in ("div", "true_divide", "reciprocal") else None
    if given is not None and given.is_negative and given.high is not None and not failed.is_masked:
        yield SafeWhere(DIVISIONS, keeps=False)


# -- in the user's statement -------------------------------------------------------------------------------------------


_WHERE = "torch.where"
_QUOTIENTS = ("div", "true_divide", "divide")
#: The name that an operand gets where it has none.
_NAME = "operand"
#: What a part of may run later, or not at all.
_LATER = (ast.Lambda, ast.IfExp, ast.BoolOp, ast.NamedExpr, ast.comprehension, ast.Await, ast.Yield)


def _write(statement: Statement, asked: Asked) -> Sequence[Splice]:
    """``where(m, a / b, 0)`` becomes ``where(m, a / torch.where(m, b, 1.0), 0)``, ``a / b`` alone one by ``b == 0``."""
    choices = _choices(statement)
    if len(choices) != 1:
        return _safe_operand(statement, asked.found(statement)) if not choices else ()
    choice = choices[0]
    if choice.name != "where" or choice.is_method or len(choice.operands) != 3:
        return ()
    condition, *branches = choice.operands
    inside = [(number, found) for number, each in enumerate(branches) if (found := _inside(statement, each, asked))]
    if len(inside) != 1 or not can_repeat(condition):
        return ()
    branch, found = inside[0]
    place = found.operand(int(found.name in _QUOTIENTS))
    if place is None or is_number(place) or _is_chosen(place, condition):
        return ()
    safe = [statement.text(place), "1.0"]
    text = f"{statement.spelled(_WHERE)}({statement.text(condition)}, {', '.join(safe if branch == 0 else safe[::-1])})"
    return [found.with_operand(statement, place, text)]


def _safe_operand(statement: Statement, found: TorchCall | None) -> Sequence[Splice]:
    """An operand that is 1 where the op is not defined; a root of zero is zero, and only its slope is not."""
    place = found.operand(int(found.name in _QUOTIENTS)) if found is not None else None
    if found is None or place is None or not is_plain(place) or is_number(place):
        return ()
    return _safe(statement, found, place, statement.text(place))


def _safe(statement: Statement, found: TorchCall, place: ast.expr, text: str) -> Sequence[Splice]:
    if not isinstance(found.node, ast.expr):
        return ()
    where = statement.spelled(_WHERE)
    bad = f"{text} {'==' if found.name in (*_QUOTIENTS, 'reciprocal') else '<='} 0"
    inner = found.with_operand(statement, place, f"{where}({bad}, 1.0, {text})")
    if found.name not in ("sqrt", "pow"):
        return [inner]
    return [statement.instead(found.node, f"{where}({bad}, 0.0, {statement.text_with(found.node, inner)})")]


def _write_named(statement: Statement, asked: Asked) -> tuple[tuple[str, ...], Sequence[Splice]]:
    """The same of an operand that is computed: it gets a name in a line before, for it is read more than once.

    Returns:
        The line, and what changes in the statement; nothing where the operand may not be computed there.
    """
    found = asked.found(statement)
    place = found.operand(int(found.name in _QUOTIENTS)) if found is not None else None
    if found is None or place is None or is_number(place) or _choices(statement):
        return (), ()
    body = statement.tree.body
    simple = len(body) == 1 and isinstance(body[0], (ast.Assign, ast.Return, ast.Expr)) and not statement.after
    if not simple or any(isinstance(node, _LATER) for node in ast.walk(statement.tree)) or _NAME in statement.code:
        return (), ()
    if "\n" in statement.text(place):
        return (), ()
    return (f"{_NAME} = {statement.text(place)}",), _safe(statement, found, place, _NAME)


def _choices(statement: Statement) -> list[TorchCall]:
    return [each for each in found_calls(statement, "where") if each.name == "where"]


def _inside(statement: Statement, branch: ast.expr, asked: Asked) -> TorchCall | None:
    """The op that fails in a branch: the one that is named, or the only one that may."""
    return found_call(statement, asked.name, branch) if asked.name != "where" else None


def _is_chosen(place: ast.expr, condition: ast.expr) -> bool:
    """Whether an operand is made safe by the same condition already."""
    inner = as_call(place, "where")
    return inner is not None and any(same(each, condition) for each in inner.operands[:2])


def _has_value(asked: Asked) -> bool:
    """Whether the op has a value where its operand is made safe: a root of zero is zero."""
    return asked.call in _SLOPES


def _where(asked: Asked) -> str:
    return "0" if asked.call in ("div", "true_divide", "reciprocal") else "not positive"


def _tried(asked: Asked) -> str:
    if _has_value(asked):
        return f"no gradient through {asked.call} where its operand is {_where(asked)}"
    return f"the {operand(asked)} replaced by 1 where it is {_where(asked)}"


def _sentence(asked: Asked) -> str:
    if _has_value(asked):
        return (
            f"Let no gradient through {asked.call} where its operand is {_where(asked)}: its slope is infinite there."
        )
    return (
        f"Replace the {operand(asked)} by 1 where it is {_where(asked)}, before the op; a torch.where after it is too "
        "late."
    )


def _code(asked: Asked) -> str:
    if asked.call in ("div", "true_divide"):
        return "y = a / torch.where(b == 0, 1.0, b)"
    condition = "x == 0" if asked.call == "reciprocal" else "x <= 0"
    power = ", p" if asked.call == "pow" else ""
    if _has_value(asked):
        return f"bad = {condition}\ny = torch.where(bad, 0.0, torch.{asked.call}(torch.where(bad, 1.0, x){power}))"
    return f"y = torch.{asked.call}(torch.where({condition}, 1.0, x){power})"


FORMS = (
    CureForm(
        form=Form.SAFE_WHERE,
        tried=_tried,
        sentence=_sentence,
        code=_code,
        turn=TrialTurn.SAFE,
        rules=(safe_where_masked, safe_where_sloped, safe_where_divided),
        live=(SafeWhere,),
        rewriting=_write,
        named=_write_named,
    ),
)
