"""Whether a product is one of a factor that the program has scaled already."""

from __future__ import annotations

import ast

from ampscope.analysis.cures.rewriting.found_call import found_calls
from ampscope.analysis.cures.rewriting.names import is_number
from ampscope.analysis.cures.rewriting.program.own_names import function_around, own_nodes
from ampscope.analysis.cures.rewriting.source_file import Found, HasPlace, statement_at
from ampscope.analysis.cures.rewriting.statement import dotted, statement

#: What attributes and arguments are called that hold the scale of a product.
_SCALES = ("scale", "scaling", "temperature")


def is_scaled_before(place: HasPlace) -> bool:
    """Whether a factor of the product on a line is multiplied with a number, or divided by one, before the product.

    Args:
        place: The line, as it was recorded.
    """
    found = statement_at(place)
    parsed = statement(
        found.code if found is not None else place.code, scope=found.scope if found is not None else None
    )
    products = found_calls(parsed, "matmul") if parsed is not None else []
    factors = [factor for each in products for number in (0, 1) if (factor := each.operand(number)) is not None]
    return any(_is_scaled(each) or (found is not None and _was_scaled(found, each)) for each in factors)


def _is_scaled(node: ast.AST) -> bool:
    if not isinstance(node, (ast.BinOp, ast.AugAssign)) or not isinstance(node.op, (ast.Mult, ast.Div)):
        return False
    sides = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
    return any(is_number(side) or dotted(side).rpartition(".")[2].endswith(_SCALES) for side in sides)


def _was_scaled(found: Found, factor: ast.expr) -> bool:
    """Whether a name got a scaled value in its function, above the line."""
    tree, name = found.source.tree(), _tensor(factor)
    if tree is None or not name:
        return False
    above = [node for node in own_nodes(function_around(tree, found.first)) if getattr(node, "lineno", 0) < found.first]
    for node in above:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if name in [dotted(each) for each in targets if each is not None]:
            value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else node
            if value is not None and _is_scaled(value):
                return True
    return False


def _tensor(factor: ast.expr) -> str:
    """The name of what a factor is a view of: ``k`` of ``k.transpose(-2, -1)``."""
    while isinstance(factor, (ast.Call, ast.Attribute)):
        factor = factor.func if isinstance(factor, ast.Call) else factor.value
    return dotted(factor)
