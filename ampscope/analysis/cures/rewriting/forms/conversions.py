"""Half precision that a line asks for by name, in another dtype."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ampscope.analysis.cures.rewriting.edit import Edit
from ampscope.analysis.cures.rewriting.statement import Splice, Statement, statement

#: Dtypes that are no remedy for each other's narrow range.
_HALF = {"bfloat16": frozenset({"half", "float16"})}
_EITHER = frozenset({"half", "float16", "bfloat16"})


def converted(code: str, dtype: str) -> Edit | None:
    """A statement with another dtype in the place of the half dtype that it names.

    Args:
        code: The statement.
        dtype: ``float32`` or ``bfloat16``.

    Returns:
        The change; None where it names none, or cannot be parsed.
    """
    parsed = statement(code)
    splices = list(_splices(parsed, dtype)) if parsed is not None else []
    after = parsed.changed(splices) if parsed is not None and splices else None
    return Edit(code, after) if after is not None else None


def _splices(parsed: Statement, dtype: str) -> Sequence[Splice]:
    half, found = _HALF.get(dtype, _EITHER), []
    methods = [node.func for node in parsed.nodes() if isinstance(node, ast.Call) and not (node.args or node.keywords)]
    for node in parsed.nodes():
        if not isinstance(node, ast.Attribute) or node.attr not in half:
            continue
        of_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
        if of_torch or node in methods:
            end = parsed.span(node)[1]
            name = dtype if of_torch else {"float32": "float"}.get(dtype, dtype)
            found.append(Splice(end - len(node.attr), end, name))
    return found
