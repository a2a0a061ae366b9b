"""A product and the scaling of its result, where they stand in two statements of one block."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ampscope.analysis.cures.rewriting.changed_file import changed
from ampscope.analysis.cures.rewriting.forms.products import scaled_operand
from ampscope.analysis.cures.rewriting.found_call import as_call
from ampscope.analysis.cures.rewriting.names.scopes import scope_at
from ampscope.analysis.cures.rewriting.source_file import HasPlace, SourceFile, source_file
from ampscope.analysis.cures.rewriting.statement import Statement, is_plain, statement

_PRODUCTS = ("matmul", "mm", "bmm")


def scale_first(place: HasPlace, argument: int) -> str | None:
    """``y = a @ b`` and then ``y / s`` become ``y = (a / s) @ b`` and ``y``, as a diff of the file.

    Args:
        place: The line of the product, as it was recorded.
        argument: The factor that is scaled.
    """
    source = source_file(place)
    tree = source.tree() if source is not None else None
    if source is None or tree is None:
        return None
    for block in _blocks(tree):
        at = [number for number, node in enumerate(block) if node.lineno == node.end_lineno == place.line]
        if len(at) == 1:
            return _in_block(source, tree, place.file, block[at[0] :], argument)
    return None


def _blocks(tree: ast.Module) -> list[list[ast.stmt]]:
    held = [value for node in ast.walk(tree) for _, value in ast.iter_fields(node) if isinstance(value, list)]
    return [block for block in held if block and all(isinstance(each, ast.stmt) for each in block)]


def _in_block(source: SourceFile, tree: ast.Module, file: str, block: Sequence[ast.stmt], argument: int) -> str | None:
    """The change of a product, the first statement of these, and of the one that scales what it gave."""
    made = block[0]
    if not isinstance(made, ast.Assign) or len(made.targets) != 1 or not isinstance(made.targets[0], ast.Name):
        return None
    name = made.targets[0].id
    uses = [node for node in block[1:] if name in _names(node, ast.Load)]
    if len(uses) != 1 or _names(uses[0], ast.Load).count(name) != 1 or uses[0].lineno != uses[0].end_lineno:
        return None
    first, second = (statement(source.code(node.lineno), scope=scope_at(tree, node.lineno)) for node in (made, uses[0]))
    scaling = _scaling(second, name) if second is not None else None
    if first is None or second is None or scaling is None:
        return None
    node, by = scaling
    between = [stored for each in block[: block.index(uses[0])] for stored in _names(each, ast.Store)]
    if set(between) & {each.id for each in ast.walk(by) if isinstance(each, ast.Name)}:
        return None
    product = as_call(first.tree.body[0].value, *_PRODUCTS) if isinstance(first.tree.body[0], ast.Assign) else None
    sign = "*" if isinstance(node.op, ast.Mult) else "/"
    scaled = scaled_operand(first, product, argument, f"{sign} {second.factor(by)}") if product is not None else None
    whole = second.instead_of_all if _is_owner(second, node) else second.instead
    after = (first.changed([scaled]) if scaled is not None else None, second.changed([whole(node, name)]))
    if after[0] is None or after[1] is None:
        return None
    rows = [(at.lineno, source.indent(at.lineno) + row) for at, row in zip((made, uses[0]), after, strict=True) if row]
    return changed(source, file, [(line, line, [row]) for line, row in rows])


def _scaling(second: Statement, name: str) -> tuple[ast.BinOp, ast.expr] | None:
    """Where a value is multiplied with a number or divided by one, and the number."""
    for node in second.nodes():
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)):
            sides = [node.left, node.right]
            named = [isinstance(side, ast.Name) and side.id == name for side in sides]
            if named[0] or (named[1] and isinstance(node.op, ast.Mult)):
                by = sides[1] if named[0] else sides[0]
                return (node, by) if is_plain_number(by) else None
    return None


def is_plain_number(node: ast.expr) -> bool:
    """Whether a part may be computed earlier: names, lengths and what is computed of them."""
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    known = all(isinstance(each.func, ast.Attribute) and each.func.attr in ("size", "sqrt") for each in calls)
    return known and (bool(calls) or is_plain(node) or isinstance(node, ast.BinOp))


def _is_owner(statement: Statement, node: ast.expr) -> bool:
    """Whether a method is called of a part, or an operator applied to it: parentheses around it are its own."""
    kinds = (ast.Attribute, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Assign, ast.Return)
    return any(isinstance(each, kinds) and node in ast.iter_child_nodes(each) for each in statement.nodes())


def _names(node: ast.AST, context: type[ast.expr_context]) -> list[str]:
    return [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, context)]
