"""Half precision that a line asks for by name is written in another dtype."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ampscope.cures.rewriting.edit import Edit
from ampscope.cures.rewriting.names import NameScope, path_of
from ampscope.cures.rewriting.statement import Splice, Statement, dotted, statement

#: Dtypes that are no remedy for each other's narrow range.
_HALF = {"bfloat16": frozenset({"half", "float16"})}
_EITHER = frozenset({"half", "float16", "bfloat16"})


def converted(code: str, dtype: str, scope: NameScope | None = None) -> Edit | None:
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


def with_dtype(code: str, scope: NameScope | None) -> Edit | None:
    """A call that is given a dtype by a name of the program's, with float32 in its place."""
    parsed = statement(code, scope=scope)
    calls = [node for node in parsed.nodes() if isinstance(node, ast.Call)] if parsed is not None else []
    given = [each.value for call in calls for each in call.keywords if each.arg in ("dtype", "torch_dtype")]
    if parsed is None or len(given) != 1 or not dotted(given[0]):
        return None
    after = parsed.changed([parsed.instead(given[0], parsed.spelled("torch.float32"))])
    imports = parsed.needs(after) if after is not None else None
    return Edit(code, after, imports) if after is not None and imports is not None else None
