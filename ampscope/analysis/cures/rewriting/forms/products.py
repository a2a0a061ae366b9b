"""Products and squares in an order in which their intermediate values stay small."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ampscope.analysis.cures.rewriting.forms.asked import Asked
from ampscope.analysis.cures.rewriting.found_call import Found, as_call, found_call
from ampscope.analysis.cures.rewriting.literals import value_of
from ampscope.analysis.cures.rewriting.names.known import is_number
from ampscope.analysis.cures.rewriting.statement import Splice, Statement, is_plain, same


def scale_first(statement: Statement, asked: Asked) -> Sequence[Splice]:
    """``(a @ b) * s`` becomes ``(a * s) @ b``."""
    product = asked.found(statement) if asked.call else found_call(statement, "matmul")
    scaling = _scaling(statement, product) if product is not None else None
    if product is None or scaling is None or not isinstance(product.node, ast.expr):
        return ()
    by, sign = scaling
    outer, other = _parent(statement, product.node), product.operand(1)
    first = product.operand(0)
    if first is None or other is None or not isinstance(outer, ast.BinOp) or _is_scaled(first) or _is_scaled(other):
        return ()
    scaled = scaled_operand(statement, product, asked.argument, f"{sign} {statement.factor(by)}")
    if scaled is None:
        return ()
    start, end = statement.span(product.node)
    before, after = (
        statement.code.encode()[part].decode() for part in (slice(start, scaled.start), slice(scaled.end, end))
    )
    return [statement.instead(outer, f"{before}{scaled.text}{after}")]


def scaled_operand(statement: Statement, product: Found, argument: int | None, scaling: str) -> Splice | None:
    """A factor of a product, scaled.

    Args:
        statement: The statement.
        product: The product.
        argument: Which factor, the first where that is not said.
        scaling: ``* 0.125``, ``/ 8``.
    """
    meant = product.operand(argument if argument in (0, 1) else 0)
    if meant is None or _is_scaled(meant):
        return None
    text = f"{_left_factor(statement, meant)} {scaling}"
    inner = product.is_operator or (product.is_method and meant is product.operands[0])
    return statement.instead_of_all(meant, f"({text})") if inner else statement.instead(meant, text)


def _scaling(statement: Statement, product: Found) -> tuple[ast.expr, str] | None:
    """What the product is multiplied with or divided by."""
    outer = _parent(statement, product.node)
    if not isinstance(outer, ast.BinOp) or not isinstance(outer.op, (ast.Mult, ast.Div)):
        return None
    sign = "*" if isinstance(outer.op, ast.Mult) else "/"
    if outer.left is product.node:
        return outer.right, sign
    return (outer.left, sign) if sign == "*" else None


def _parent(statement: Statement, node: ast.AST) -> ast.AST | None:
    return next((each for each in statement.nodes() if node in ast.iter_child_nodes(each)), None)


def _is_scaled(node: ast.expr) -> bool:
    """Whether an operand is scaled already."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div))


def _left_factor(statement: Statement, node: ast.expr) -> str:
    """The text of what a factor follows: products group from the left."""
    return statement.text(node) if isinstance(node, ast.BinOp) and _binds(node) else statement.factor(node)


def _binds(node: ast.BinOp) -> bool:
    return isinstance(node.op, (ast.Mult, ast.Div, ast.MatMult, ast.Pow))


def centred(statement: Statement) -> Sequence[Splice]:
    """``x.pow(2).mean(-1) - x.mean(-1).pow(2)`` becomes ``(x - x.mean(-1, keepdim=True)).square().mean(-1)``."""
    found = [each for node in statement.nodes() if (each := _variance(statement, node)) is not None]
    if len(found) != 1:
        return ()
    node, operand, how = found[0]
    once = ", ".join([*how, *([] if any(each.startswith("keepdim") for each in how) or not how else ["keepdim=True"])])
    atom = statement.atom(operand)
    text = f"({statement.text(operand)} - {atom}.mean({once})).square().mean({', '.join(how)})"
    return [statement.instead(node, text)]


def _variance(statement: Statement, node: ast.AST) -> tuple[ast.BinOp, ast.expr, list[str]] | None:
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


def _arguments(statement: Statement, found: Found) -> list[str]:
    return [*map(statement.text, found.operands[1:]), *map(statement.text, found.keywords.values())]


def _squared(node: ast.AST | None) -> ast.expr | None:
    """What is squared."""
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
