"""Half precision that a line asks for by name is written in another dtype, or a call is given float32."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ampscope.analysis.rewriting.edit import Edit
from ampscope.analysis.rewriting.found_call import Asked, Found, as_call
from ampscope.analysis.rewriting.names import Scope, is_number, path_of
from ampscope.analysis.rewriting.statement import Splice, Statement, dotted, is_plain, statement

#: Dtypes that are no remedy for each other's narrow range.
_HALF = {"bfloat16": frozenset({"half", "float16"})}
_EITHER = frozenset({"half", "float16", "bfloat16"})


def converted(code: str, dtype: str, scope: Scope | None = None) -> Edit | None:
    """A statement that converts to half precision, with another dtype in the place of the half dtype that it names.

    Where it names none, its one conversion takes the dtype from something else (``x.to(y.dtype)``).

    Args:
        code: The statement.
        dtype: ``float32`` or ``bfloat16``.
        scope: Where it stands in its program; None where that is not at hand.

    Returns:
        The change; None where it is not clear what converts, or the statement cannot be parsed.
    """
    parsed = statement(code, scope=scope)
    splices = (list(_splices(parsed, dtype)) or list(_of_another(parsed, dtype))) if parsed is not None else []
    after = parsed.changed(splices) if parsed is not None and splices else None
    imports = parsed.needs(after) if parsed is not None and after is not None else None
    return Edit(code, after, imports) if after is not None and imports is not None else None


def _splices(parsed: Statement, dtype: str) -> Sequence[Splice]:
    half, found = _HALF.get(dtype, _EITHER), []
    methods = [node.func for node in parsed.nodes() if isinstance(node, ast.Call) and not (node.args or node.keywords)]
    for node in parsed.nodes():
        if not isinstance(node, ast.Attribute) or node.attr not in half:
            continue
        of_torch = path_of(node.value) == "torch"
        if of_torch or node in methods:
            end = parsed.span(node)[1]
            name = dtype if of_torch else {"float32": "float"}.get(dtype, dtype)
            found.append(Splice(end - len(node.attr), end, name))
    return found


def _of_another(parsed: Statement, dtype: str) -> Sequence[Splice]:
    """The dtype of the one conversion that takes it from another tensor, or by the name ``dtype``."""
    calls = [node for node in parsed.nodes() if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    given = [
        argument
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "to"
        for argument in (*call.args, *(each.value for each in call.keywords if each.arg == "dtype"))
    ]
    taken = [each for each in given if dotted(each).rpartition(".")[2] == "dtype"]
    return [parsed.instead(taken[0], parsed.spelled(f"torch.{dtype}"))] if len(taken) == 1 else []


def with_dtype(code: str, scope: Scope | None) -> Edit | None:
    """A call that is given a dtype by a name of the program's, with float32 in its place."""
    parsed = statement(code, scope=scope)
    calls = [node for node in parsed.nodes() if isinstance(node, ast.Call)] if parsed is not None else []
    given = [each.value for call in calls for each in call.keywords if each.arg in ("dtype", "torch_dtype")]
    if parsed is None or len(given) != 1 or not dotted(given[0]):
        return None
    after = parsed.changed([parsed.instead(given[0], parsed.spelled("torch.float32"))])
    imports = parsed.needs(after) if after is not None else None
    return Edit(code, after, imports) if after is not None and imports is not None else None


#: Products, which autocast runs in half precision whatever dtype they are given.
_PRODUCTS = frozenset({"matmul", "mm", "bmm", "mv", "dot", "inner", "tensordot", "prelu", "linear", "bilinear"})
_SUMMED = frozenset({"addmm", "baddbmm", "addbmm", "addmv", "addr"})  #: after a tensor that is added to the product
_CONVOLUTIONS = frozenset({f"conv{way}{dims}d" for way in ("", "_transpose") for dims in (1, 2, 3)})
_IN_HALF = _PRODUCTS | _SUMMED | _CONVOLUTIONS | {"einsum", "scaled_dot_product_attention"}
#: What a line may call beside a product and runs as well outside autocast: views and what follows its operands' dtype.
_FOLLOWING = frozenset(
    {"transpose", "permute", "view", "reshape", "contiguous", "unsqueeze", "squeeze", "flatten", "expand", "chunk"}
    | {"t", "float", "softmax", "size", "swapaxes", "sum", "mean", "clamp", "relu", "tanh", "sigmoid", "sqrt", "len"}
)


def in_float32(statement: Statement, asked: Asked) -> Sequence[Splice]:
    """``x.sum()`` becomes ``x.float().sum()``; a product goes into a block without autocast as well."""
    calls = asked.all_found(statement)
    if not calls or any(isinstance(each.node, ast.AugAssign) for each in calls):
        return ()
    if calls[0].name not in _IN_HALF:
        unclear = len(calls) > 1 and any(each.is_operator for each in calls)
        return [] if unclear else [splice for each in calls for splice in _given_float(statement, each, asked)]
    return _product(statement, calls[0]) if len(calls) == 1 else ()


def _given_float(statement: Statement, found: Found, asked: Asked) -> Sequence[Splice]:
    place = found.operand(asked.argument or 0)
    return [_float(statement, found, place)] if place is not None and _may_cast(place) else ()


def _product(statement: Statement, found: Found) -> Sequence[Splice]:
    """A product on float32 operands, in a block that autocast does not reach."""
    operands = _factors(found)
    if not operands or not _runs_alone(statement, found):
        return ()
    device = next((statement.text(each) for each in _tensors(operands)), "")
    if not device:
        return ()
    casts = [_float(statement, found, each) for each in operands if _may_cast(each)]
    body = statement.changed(casts)
    block = f"with {statement.spelled('torch.autocast')}({device}.device.type, enabled=False):\n    "
    return [Splice(0, len(statement.code.encode()), block + body)] if body is not None else ()


def _factors(found: Found) -> list[ast.expr]:
    """The tensors that a product is made of; none where one may be something else, or is not seen."""
    given, at = list(found.operands), 0
    wanted = 3 if found.name in _SUMMED or found.name in ("bilinear", "scaled_dot_product_attention") else 2
    if found.name == "einsum":
        at, wanted = 1, len(given)
        if not given or not isinstance(given[0], ast.Constant):
            return []
    if found.name in _PRODUCTS and len(given) < wanted:
        given = [each for number in (0, 1) if (each := found.operand(number)) is not None]
    may_have = found.name in ("linear", "bilinear", *_CONVOLUTIONS)
    has_bias = "bias" in found.keywords or (may_have and len(given) > wanted)
    factors = given[at:wanted]  # a bias may be None
    return factors if len(factors) == wanted - at and not has_bias and not any(map(is_number, factors)) else []


def _float(statement: Statement, found: Found, place: ast.expr) -> Splice:
    text = f"{statement.atom(place)}.float()"
    inner = found.is_operator or (found.is_method and place is found.operands[0])
    return statement.instead_of_all(place, text) if inner else statement.instead(place, text)


def _may_cast(place: ast.expr) -> bool:
    """Whether an operand is a tensor, as far as it shows, and not in float32 already."""
    cast = as_call(place, "float", "double")
    return cast is None and not is_number(place)


def _tensors(operands: Sequence[ast.expr]) -> Iterator[ast.expr]:
    """Names of tensors in the operands: the operands themselves, or what their methods are called of."""
    for operand in operands:
        tensor = operand
        while isinstance(tensor, ast.Call) and isinstance(tensor.func, ast.Attribute):
            tensor = tensor.func.value
        if dotted(tensor) and is_plain(tensor) and not path_of(tensor):
            yield tensor


def _runs_alone(statement: Statement, found: Found) -> bool:
    """Whether a line can go into a block of its own, and calls nothing else that needs autocast."""
    if statement.before or statement.after or "\n" in statement.code or len(statement.tree.body) != 1:
        return False
    body = statement.tree.body[0]
    if isinstance(body, ast.Assign) and f"{statement.text(body.targets[0])} =" not in statement.code:
        return False  # an argument of a call that the line is a part of
    calls = [node for node in statement.nodes() if isinstance(node, ast.Call) and node is not found.node]
    names = [each.func.attr if isinstance(each.func, ast.Attribute) else dotted(each.func) for each in calls]
    owned = [dotted(each.func.value) for each in calls if isinstance(each.func, ast.Attribute)]
    return isinstance(body, (ast.Assign, ast.Return)) and _FOLLOWING.issuperset(names) and "self" not in owned
