"""Products and squares are written in an order in which intermediate values stay small, over two lines where needed."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ampscope.analysis.rewriting.edit import changed
from ampscope.analysis.rewriting.forms.constants import value_of
from ampscope.analysis.rewriting.found_call import Asked, Found, as_call, found_call
from ampscope.analysis.rewriting.names import is_number, scope_at
from ampscope.analysis.rewriting.source_file import HasPlace, SourceFile, source_file
from ampscope.analysis.rewriting.statement import Splice, Statement, is_plain, same, statement


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
    """Returns the factor or divisor that is applied to a product, and the operator; None where there is none."""
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


_PRODUCTS = ("matmul", "mm", "bmm")


def scale_first_above(place: HasPlace, argument: int) -> str | None:
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
    scaling = _scaling_of(second, name) if second is not None else None
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


def _scaling_of(second: Statement, name: str) -> tuple[ast.BinOp, ast.expr] | None:
    """Finds where a value is multiplied with a number or divided by one, and the number."""
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
