"""The logarithm of one exponential's share of a sum of them: a softmax that was written by hand."""

from __future__ import annotations

import ast

from ampscope.analysis.cures.rewriting.found_call import Found, as_call
from ampscope.analysis.cures.rewriting.statement import Statement, same

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
    """What a part picks its elements from: the part itself, where it picks none."""
    is_pick = isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in _PICKS
    if is_pick and isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and not part.args:
        return part.func.value
    return part
