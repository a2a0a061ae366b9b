"""Logarithms of exponentials and of quotients are written as the functions that compute them without overflow."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ampscope.analysis.rewriting.forms.constants import value_of
from ampscope.analysis.rewriting.found_call import Found, as_call, found_call, found_calls
from ampscope.analysis.rewriting.names import is_number
from ampscope.analysis.rewriting.statement import Splice, Statement, is_plain, same

#: Methods that pick one element of each row, in the order of the rows.
_PICKS = frozenset({"diagonal", "diag"})


def log_softmax_in(statement: Statement, logarithm: Found) -> str:
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
    start, end = statement.span(part)
    inside, last = statement.span(inner.node)
    content = statement.code.encode()
    logs = f"{statement.atom(operand)}.log_softmax({dim})"
    return content[start:inside].decode() + logs + content[last:end].decode()


def _dim(statement: Statement, total: Found) -> str:
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


def log_softmax(statement: Statement) -> Sequence[Splice]:
    """``torch.log(x.softmax(-1))`` becomes ``x.log_softmax(-1)``."""
    return _all_replaced(statement, [(each, _log_softmax(statement, each)) for each in found_calls(statement, _LOG)])


def _log_softmax(statement: Statement, logarithm: Found) -> str:
    inner = as_call(_unguarded(_first(logarithm)), "softmax")
    return _renamed(statement, inner, "log_softmax") if inner else log_softmax_in(statement, logarithm)


def logsigmoid(statement: Statement) -> Sequence[Splice]:
    """``torch.log(torch.sigmoid(x))`` becomes ``F.logsigmoid(x)``, that of ``1 - sigmoid(x)`` that of ``-x``."""
    found = [(each, _sigmoid_in(statement, each)) for each in found_calls(statement, _LOG)]
    name = statement.spelled(f"{_FUNCTIONAL}.logsigmoid")
    return _all_replaced(statement, [(each, f"{name}({given})" if given else "") for each, given in found])


def _sigmoid_in(statement: Statement, logarithm: Found) -> str:
    """Returns what a sigmoid in a logarithm is given, negated for ``1 - sigmoid(x)``; empty where there is none."""
    operand = _unguarded(_first(logarithm))
    rest = _taken_from_one(operand)
    given = _first(as_call(rest if rest is not None else operand, "sigmoid"))
    if given is None:
        return ""
    return statement.text(given) if rest is None else f"-{statement.atom(given)}"


def with_logits(statement: Statement) -> Sequence[Splice]:
    """``binary_cross_entropy(sigmoid(x), y)`` becomes ``binary_cross_entropy_with_logits(x, y)``."""
    loss = found_call(statement, "binary_cross_entropy")
    inner = as_call(_unguarded(_first(loss)), "sigmoid")
    given, probability = _first(inner), _first(loss)
    if loss is None or given is None or probability is None or loss.is_method:
        return ()
    name = _name(statement, loss, "binary_cross_entropy_with_logits")
    return [name, statement.instead(probability, statement.text(given))]


def cross_entropy(statement: Statement) -> Sequence[Splice]:
    """``nll_loss(log(softmax(x, dim=1)), y)`` becomes ``cross_entropy(x, y)``."""
    loss = found_call(statement, "nll_loss")
    logarithm = as_call(_first(loss), _LOG)
    inner = as_call(_unguarded(_first(logarithm)), "softmax")
    given, logs = _first(inner), _first(loss)
    if loss is None or logarithm is None or inner is None or given is None or logs is None or loss.is_method:
        return ()
    dim = inner.keywords["dim"].value if "dim" in inner.keywords else inner.operand(1)
    if dim is None or value_of(dim) != 1.0:  # over another one it is not what nll_loss reads
        return [_replaced(statement, logarithm, _renamed(statement, inner, "log_softmax"))]
    return [_name(statement, loss, "cross_entropy"), statement.instead(logs, statement.text(given))]


def logsumexp(statement: Statement) -> Sequence[Splice]:
    """``x.exp().sum(-1).log()`` becomes ``x.logsumexp(-1)``."""
    found = [(each, _sum_in(statement, each)) for each in found_calls(statement, _LOG)]
    return [_replaced(statement, each, text) for each, text in found if text]


def _sum_in(statement: Statement, logarithm: Found) -> str:
    """The logarithm of a sum of exponentials in one call; empty where it is of something else."""
    total = as_call(_first(logarithm), "sum")
    given = _first(as_call(_first(total), "exp"))
    if total is None or given is None or not {"dim", "keepdim"}.issuperset(total.keywords):
        return ""
    rest = [*(statement.text(each) for each in total.operands[1:]), *map(statement.text, total.keywords.values())]
    tensor = statement.atom(given)
    return f"{tensor}.logsumexp({', '.join(rest)})" if rest else f"{tensor}.flatten().logsumexp(0)"


def max_off(statement: Statement) -> Sequence[Splice]:
    """``exp(x) / exp(x).sum(-1)``: the largest of each row is taken off before; it cancels out in the quotient."""
    totals = [each for node in statement.nodes() if (each := _divisor(node)) is not None]
    hows = {", ".join([*map(statement.text, each.operands[1:2]), *_dims(statement, each)]) for each in totals}
    raised = found_calls(statement, "exp")
    of = [_first(each) for each in raised]
    if len(hows) != 1 or not all(each is not None and of[0] is not None and same(each, of[0]) for each in of):
        return ()  # what is taken off one and not another does not cancel out
    (how,) = hows
    return [splice for each in raised for splice in _less_its_largest(statement, each, how)]


def _divisor(node: ast.AST) -> Found | None:
    """The sum of exponentials by which a part divides, with nothing added to it."""
    quotient = as_call(node, "div")
    total = as_call(quotient.operand(1), "sum") if quotient is not None else None
    return total if as_call(_first(total), "exp") is not None else None


def _dims(statement: Statement, total: Found) -> list[str]:
    return [statement.text(total.keywords["dim"])] if "dim" in total.keywords else []


def _less_its_largest(statement: Statement, found: Found, how: str) -> Sequence[Splice]:
    operand = _first(found)
    if operand is None or not is_plain(operand) or is_number(operand):
        return ()
    largest = f"amax({how}, keepdim=True)" if how else "max()"
    less = f"{statement.summand(operand)} - {statement.atom(operand)}.{largest}"
    return [statement.instead_of_all(operand, f"({less})") if found.is_method else statement.instead(operand, less)]


def _first(found: Found | None) -> ast.expr | None:
    return found.operand(0) if found is not None else None


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


def _all_replaced(statement: Statement, texts: Sequence[tuple[Found, str]]) -> Sequence[Splice]:
    """Calls by other ones; none where one has no other: it may be the one that is meant."""
    return [_replaced(statement, *each) for each in texts] if all(text for _, text in texts) else ()


def _replaced(statement: Statement, found: Found, text: str) -> Splice:
    assert isinstance(found.node, ast.expr)
    return statement.instead(found.node, text)


def _renamed(statement: Statement, found: Found, name: str) -> str:
    assert isinstance(found.node, ast.Call)
    start, end = statement.span(found.node)
    function = _name(statement, found, name)
    content = statement.code.encode()
    return (content[start : function.start] + function.text.encode() + content[function.end : end]).decode()


def _name(statement: Statement, found: Found, name: str) -> Splice:
    """Another function's name in the place of a call's, of the same module or class; of a bare name the whole of it."""
    assert isinstance(found.node, ast.Call)
    function = found.node.func
    if isinstance(function, ast.Name):
        return statement.instead(function, statement.spelled(f"{_FUNCTIONAL}.{name}"))
    end = statement.span(function)[1]
    return Splice(end - len(found.name.encode()), end, name)
