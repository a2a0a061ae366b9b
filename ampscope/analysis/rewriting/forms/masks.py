"""Masks are rewritten: an operand made safe before the op, rows that keep a key, infinite losses set to zero."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence

from ampscope.analysis.rewriting.forms.constants import added_keyword, value_of
from ampscope.analysis.rewriting.found_call import Asked, Found, as_call, found_call, found_calls
from ampscope.analysis.rewriting.names import is_number
from ampscope.analysis.rewriting.statement import Splice, Statement, dotted, is_plain, same

_WHERE = "torch.where"
_DIVISIONS = ("div", "true_divide", "divide")
#: The name that an operand gets where it has none.
_NAME = "operand"
#: What a part of may run later, or not at all.
_LATER = (ast.Lambda, ast.IfExp, ast.BoolOp, ast.NamedExpr, ast.comprehension, ast.Await, ast.Yield)
#: Calls that may stand a second time in a condition: they compare, and change nothing.
_PURE = frozenset(
    {"isfinite", "isnan", "isinf", "bool", "eq", "ne", "gt", "ge", "lt", "le", "any", "all", "abs", "sum"}
    | {"logical_and", "logical_or", "logical_not", "size", "unsqueeze"}
)


def safe_where(statement: Statement, asked: Asked) -> Sequence[Splice]:
    """``where(m, a / b, 0)`` becomes ``where(m, a / torch.where(m, b, 1.0), 0)``, ``a / b`` alone one by ``b == 0``."""
    choices = _choices(statement)
    if len(choices) != 1:
        return _safe_operand(statement, asked.found(statement)) if not choices else ()
    choice = choices[0]
    if choice.name != "where" or choice.is_method or len(choice.operands) != 3:
        return ()
    condition, *branches = choice.operands
    inside = [(number, found) for number, each in enumerate(branches) if (found := _inside(statement, each, asked))]
    if len(inside) != 1 or not _can_repeat(condition):
        return ()
    branch, found = inside[0]
    place = found.operand(int(found.name in _DIVISIONS))
    if place is None or is_number(place) or _is_chosen(place, condition):
        return ()
    safe = [statement.text(place), "1.0"]
    text = f"{statement.spelled(_WHERE)}({statement.text(condition)}, {', '.join(safe if branch == 0 else safe[::-1])})"
    return [_put(statement, found, place, text)]


def _safe_operand(statement: Statement, found: Found | None) -> Sequence[Splice]:
    """An operand that is 1 where the op is not defined; a root of zero is zero, and only its slope is not."""
    place = found.operand(int(found.name in _DIVISIONS)) if found is not None else None
    if found is None or place is None or not is_plain(place) or is_number(place):
        return ()
    return _safe(statement, found, place, statement.text(place))


def _safe(statement: Statement, found: Found, place: ast.expr, text: str) -> Sequence[Splice]:
    if not isinstance(found.node, ast.expr):
        return ()
    where = statement.spelled(_WHERE)
    bad = f"{text} {'==' if found.name in (*_DIVISIONS, 'reciprocal') else '<='} 0"
    inner = _put(statement, found, place, f"{where}({bad}, 1.0, {text})")
    if found.name not in ("sqrt", "pow"):
        return [inner]
    start, end = statement.span(found.node)
    content = statement.code.encode()
    call = content[start : inner.start].decode() + inner.text + content[inner.end : end].decode()
    return [Splice(start, end, f"{where}({bad}, 0.0, {call})")]


def named_operand(statement: Statement, asked: Asked) -> tuple[tuple[str, ...], Sequence[Splice]]:
    """The same of an operand that is computed: it gets a name in a line before, for it is read more than once.

    Returns:
        The line, and what changes in the statement; nothing where the operand may not be computed there.
    """
    found = asked.found(statement)
    place = found.operand(int(found.name in _DIVISIONS)) if found is not None else None
    if found is None or place is None or is_number(place) or _choices(statement):
        return (), ()
    body = statement.tree.body
    simple = len(body) == 1 and isinstance(body[0], (ast.Assign, ast.Return, ast.Expr)) and not statement.after
    if not simple or any(isinstance(node, _LATER) for node in ast.walk(statement.tree)) or _NAME in statement.code:
        return (), ()
    if "\n" in statement.text(place):
        return (), ()
    return (f"{_NAME} = {statement.text(place)}",), _safe(statement, found, place, _NAME)


def _choices(statement: Statement) -> list[Found]:
    return [each for each in found_calls(statement, "where") if each.name == "where"]


def _put(statement: Statement, found: Found, place: ast.expr, text: str) -> Splice:
    inner = found.is_operator or (found.is_method and place is found.operands[0])
    return statement.instead_of_all(place, text) if inner else statement.instead(place, text)


def _inside(statement: Statement, branch: ast.expr, asked: Asked) -> Found | None:
    """The op that fails in a branch: the one that is named, or the only one that may."""
    return found_call(statement, asked.call, branch) if asked.call != "where" else None


def _is_chosen(place: ast.expr, condition: ast.expr) -> bool:
    """Whether an operand is made safe by the same condition already."""
    inner = as_call(place, "where")
    return inner is not None and any(same(each, condition) for each in inner.operands[:2])


def _can_repeat(condition: ast.expr) -> bool:
    calls = [node for node in ast.walk(condition) if isinstance(node, ast.Call)]
    names = [each.func.attr if isinstance(each.func, ast.Attribute) else dotted(each.func) for each in calls]
    return _PURE.issuperset(names) and not any(isinstance(node, ast.NamedExpr) for node in ast.walk(condition))


def kept_rows(statement: Statement) -> Sequence[Splice]:
    """``masked_fill(m, -inf).softmax(-1)``: rows without a key are left out of the mask, and zero in the end."""
    softmax = found_call(statement, "softmax")
    dim = _dim(statement, softmax) if softmax is not None else ""
    scores = softmax.operand(0) if softmax is not None else None
    if softmax is None or scores is None or not dim or not isinstance(softmax.node, ast.expr):
        return ()
    end = statement.span(softmax.node)[1]
    fill = as_call(scores, "masked_fill")
    if fill is None:
        if not is_plain(scores) or not dotted(scores):
            return ()
        text = statement.text(scores)
        infinity, finfo = statement.spelled("torch.inf"), statement.spelled("torch.finfo")
        zero = f".masked_fill(({text} == -{infinity}).all({dim}, keepdim=True), 0.0)"
        lowest = f"{text}.clamp(min={finfo}({text}.dtype).min)"  # a row of nothing else becomes an even one
        return [statement.instead(scores, lowest), Splice(end, end, zero)]
    mask, value = fill.operand(1), fill.operand(2) or _keyword(fill, "value")
    if mask is None or value is None or value_of(value) != -math.inf or not _can_repeat(mask):
        return ()
    atom = statement.atom(mask)
    empty = f"{atom}.all({dim}, keepdim=True)"
    return [statement.instead(mask, f"{atom} & ~{empty}"), Splice(end, end, f".masked_fill({empty}, 0.0)")]


def _dim(statement: Statement, softmax: Found) -> str:
    place = softmax.operand(1) or _keyword(softmax, "dim")
    return statement.text(place) if place is not None else ""


def _keyword(found: Found, name: str) -> ast.expr | None:
    return found.keywords[name].value if name in found.keywords else None


def zero_infinity(statement: Statement) -> Sequence[Splice]:
    """``ctc_loss(...)`` becomes ``ctc_loss(..., zero_infinity=True)``."""
    found = found_call(statement, "ctc_loss") or found_call(statement, "CTCLoss")
    if found is None or not isinstance(found.node, ast.Call):
        return ()
    given = found.keywords.get("zero_infinity")
    if given is None:
        return [added_keyword(statement, found.node, "zero_infinity=True")] if not found.is_method else ()
    off = isinstance(given.value, ast.Constant) and given.value.value is False
    return [statement.instead(given.value, "True")] if off else ()
