"""A product is computed of scaled factors, where it is scaled afterwards."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ampscope.cures.call_form import Call, CallForm
from ampscope.cures.cure_form import CureForm, TrialTurn, exactly
from ampscope.cures.failed_op import FailedOp
from ampscope.cures.rewriting.edit import changed
from ampscope.cures.rewriting.found_call import Asked, TorchCall, as_call, found_call
from ampscope.cures.rewriting.names import scope_at
from ampscope.cures.rewriting.source_file import HasPlace, SourceFile, source_file
from ampscope.cures.rewriting.statement import Splice, Statement, is_plain, statement
from ampscope.trace.dtypes import FINFO
from ampscope.trace.schema import Form, Phase

if TYPE_CHECKING:
    from torch import Tensor

_SCALED_PRODUCTS = frozenset({"matmul", "mm", "bmm"})
#: What a product of several dimensions is reshaped with.
_VIEWS = frozenset({"view", "_unsafe_view", "reshape"})
_SCALINGS = frozenset({"mul", "div"})


class ScaleFirst(CallForm):
    """``(a * s) @ b`` for ``(a @ b) * s``; a division likewise.

    Args:
        factor: The number.
    """

    form = Form.SCALE_FIRST

    def __init__(self, factor: float) -> None:
        super().__init__(_SCALED_PRODUCTS, argument=0, value=factor)
        self._factor = factor
        self._product: Tensor | None = None

    def instead(self, call: Call) -> object:
        """See `CallForm.instead`; of the scaling after it, the product as it is."""
        if call.name in _SCALINGS:
            product, self._product = self._product, None
            return product
        self._product = call.with_operand(0, call.operands[0] * self._factor)()
        return self._product

    def belongs(self, call: Call) -> bool:
        """See `CallForm.belongs`: the scaling of that product."""
        if self._product is None or call.name not in _SCALINGS or len(call.operands) < 2:
            return False
        one, other = call.operands[:2]
        mirrored = call.name == "mul" and other is self._product and isinstance(one, (int, float))
        return mirrored or (one is self._product and isinstance(other, (int, float)))

    def before(self, call: Call) -> object:
        """See `CallForm.before`: the product, scaled after."""
        return call() * self._factor


def of_product(failed: FailedOp) -> Iterator[CallForm]:
    """The scale of a product put on its first factor, where the product alone leaves the range and scaled would not."""
    if not failed.is_of_range or failed.in_backward or failed.name not in ("mm", "bmm"):
        return
    factor = _scaling(failed)
    if factor is None or not 0 < abs(factor) < 1:
        return
    limit = FINFO.get(next(iter(failed.site.out_dtypes), ""))
    row = failed.wide
    ends = [abs(end) for end in (row.min, row.max) if end is not None] if row is not None else []
    if limit is None or any(math.isfinite(end) and end * abs(factor) > limit.max for end in ends):
        return
    yield ScaleFirst(factor)


def _scaling(failed: FailedOp) -> float | None:
    """The number by which the only reader multiplies the result of a product; None where it does something else."""
    reader, seq = None, failed.seq
    while reader is None:
        readers = {
            edge.seq for edge in failed.graph.readers[seq] if failed.graph.site(edge.seq).phase != Phase.BACKWARD
        }
        if len(readers) != 1:
            return None
        (seq,) = readers
        reader = None if failed.name_of(seq) in _VIEWS else seq
    name, number = failed.name_of(reader), failed.graph.scalars(reader).get("other")
    if not isinstance(number, (int, float)) or isinstance(number, bool) or not number:
        return None
    return {"mul": float(number), "div": 1 / number}.get(name)


# -- in the user's statement -------------------------------------------------------------------------------------------


def _write(statement: Statement, asked: Asked) -> Sequence[Splice]:
    """``(a @ b) * s`` becomes ``(a * s) @ b``."""
    product = asked.found(statement) if asked.name else found_call(statement, "matmul")
    scaling = _scaling_after(statement, product) if product is not None else None
    if product is None or scaling is None or not isinstance(product.node, ast.expr):
        return ()
    by, sign = scaling
    outer, other = next(iter(statement.parents(product.node)), None), product.operand(1)
    first = product.operand(0)
    if first is None or other is None or not isinstance(outer, ast.BinOp) or _is_scaled(first) or _is_scaled(other):
        return ()
    scaled = _scaled_operand(statement, product, asked.argument, f"{sign} {statement.factor(by)}")
    if scaled is None:
        return ()
    return [statement.instead(outer, statement.text_with(product.node, scaled))]


def _scaled_operand(statement: Statement, product: TorchCall, argument: int | None, scaling: str) -> Splice | None:
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
    bare = product.is_operator or (product.is_method and meant is product.operands[0])
    return product.with_operand(statement, meant, f"({text})" if bare else text)


def _scaling_after(statement: Statement, product: TorchCall) -> tuple[ast.expr, str] | None:
    """Returns the factor or divisor that is applied to a product, and the operator; None where there is none."""
    outer = next(iter(statement.parents(product.node)), None)
    if not isinstance(outer, ast.BinOp) or not isinstance(outer.op, (ast.Mult, ast.Div)):
        return None
    sign = "*" if isinstance(outer.op, ast.Mult) else "/"
    if outer.left is product.node:
        return outer.right, sign
    return (outer.left, sign) if sign == "*" else None


def _is_scaled(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div))


def _left_factor(statement: Statement, node: ast.expr) -> str:
    """The text of what a factor follows: products group from the left."""
    return statement.text(node) if isinstance(node, ast.BinOp) and _binds(node) else statement.factor(node)


def _binds(node: ast.BinOp) -> bool:
    return isinstance(node.op, (ast.Mult, ast.Div, ast.MatMult, ast.Pow))


_PRODUCTS = ("matmul", "mm", "bmm")


def _write_above(place: HasPlace, asked: Asked) -> str | None:
    """``y = a @ b`` and then ``y / s`` become ``y = (a / s) @ b`` and ``y``, as a diff of the file.

    Args:
        place: The line of the product, as it was recorded.
        asked: Says which factor is scaled.
    """
    source = source_file(place)
    tree = source.tree() if source is not None else None
    if source is None or tree is None:
        return None
    for block in _blocks(tree):
        at = [number for number, node in enumerate(block) if node.lineno == node.end_lineno == place.line]
        if len(at) == 1:
            return _in_block(source, tree, place.file, block[at[0] :], asked.argument or 0)
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
    scaled = _scaled_operand(first, product, argument, f"{sign} {second.factor(by)}") if product is not None else None
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
                return (node, by) if _is_plain_number(by) else None
    return None


def _is_plain_number(node: ast.expr) -> bool:
    """Whether a part may be computed earlier: names, lengths and what is computed of them."""
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    known = all(isinstance(each.func, ast.Attribute) and each.func.attr in ("size", "sqrt") for each in calls)
    return known and (bool(calls) or is_plain(node) or isinstance(node, ast.BinOp))


def _is_owner(statement: Statement, node: ast.expr) -> bool:
    """Whether a method is called of a part, or an operator applied to it: parentheses around it are its own."""
    kinds = (ast.Attribute, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Assign, ast.Return)
    return any(isinstance(each, kinds) for each in statement.parents(node))


def _names(node: ast.AST, context: type[ast.expr_context]) -> list[str]:
    return [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, context)]


FORMS = (
    CureForm(
        form=Form.SCALE_FIRST,
        tried=lambda asked: f"the first factor of {asked.call} multiplied by {exactly(asked.value)}, not the product",
        sentence=lambda asked: f"Multiply the first factor of {asked.call} by {exactly(asked.value)}, not the product.",
        code=lambda asked: f"y = (a * {exactly(asked.value)}) @ b",
        turn=TrialTurn.SCALE_FIRST,
        rules=(of_product,),
        rewriting=_write,
        elsewhere=_write_above,
    ),
)
