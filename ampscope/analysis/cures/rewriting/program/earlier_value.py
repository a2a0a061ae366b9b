"""A statement with the softmax or the sigmoid that an earlier statement of its function gave a name, written out."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ampscope.analysis.cures.rewriting.found_call import as_call, found_calls
from ampscope.analysis.cures.rewriting.program.own_names import function_around, own_nodes
from ampscope.analysis.cures.rewriting.source_file import HasPlace, SourceFile, source_file
from ampscope.analysis.cures.rewriting.statement import Statement, dotted

_PROBABILITIES = ("softmax", "sigmoid")
_CONVERSIONS = frozenset({"half", "float", "double", "bfloat16", "to", "type_as"})
#: Calls that give the same again, and draw nothing: what stands in an operand may be computed a second time then.
_REPEATABLE = _CONVERSIONS | {"view", "reshape", "transpose", "permute", "squeeze", "unsqueeze", "flatten", "size", "t"}


def written_out(parsed: Statement, place: HasPlace, call: str) -> str | None:
    """A statement in which a call reads a probability by name, with the probability itself in its place.

    Args:
        parsed: The statement.
        place: A line of it, as it was recorded.
        call: The function that reads it: ``log``, ``binary_cross_entropy``.

    Returns:
        The statement's text; None where it names none, and where the name may stand for something else by then.
    """
    source = source_file(place)
    tree = source.tree() if source is not None else None
    if source is None or tree is None:
        return None
    operands = [each.operand(0) for each in found_calls(parsed, call)]
    names = [node for each in operands if each is not None for node in ast.walk(each) if isinstance(node, ast.Name)]
    texts = {name: _text(source, tree, name, place.line) for name in {node.id for node in names}}
    splices = [parsed.instead(node, texts[node.id]) for node in names if texts[node.id]]
    return parsed.changed(splices) if splices else None


def _text(source: SourceFile, tree: ast.Module, name: str, line: int) -> str:
    """The probability that a name stands for on a line; empty where it is not known to be one."""
    scope = function_around(tree, line)
    stored = [node for node in own_nodes(scope) if isinstance(node, ast.Name) and node.id == name]
    if sum(not isinstance(node.ctx, ast.Load) for node in stored) != 1:
        return ""
    for block, here in _blocks_around(scope, line):
        for number, node in enumerate(block[:here]):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and dotted(node.targets[0]) == name:
                value = _probability(node.value)
                if value is None or _writes(block[number + 1 : here + 1], _reads(value)):
                    return ""
                text = ast.get_source_segment(source.text, value) or ""
                return text if "\n" not in text else ""
    return ""


def _blocks_around(scope: ast.AST, line: int) -> Iterator[tuple[list[ast.stmt], int]]:
    """The blocks that hold a line, from the outside, each with the place of the statement in which it is."""
    for node in ast.walk(scope):
        for _, held in ast.iter_fields(node):
            if isinstance(held, list) and held and all(isinstance(each, ast.stmt) for each in held):
                for number, each in enumerate(held):
                    if each.lineno <= line <= (each.end_lineno or 0):
                        yield held, number


def _probability(value: ast.expr) -> ast.expr | None:
    """A softmax or a sigmoid of what may be computed again, without conversions after it."""
    inner = value
    while isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr in _CONVERSIONS:
        inner = inner.func.value
    found = as_call(inner, *_PROBABILITIES)
    if found is None:
        return None
    given = [*found.operands, *(each.value for each in found.keywords.values())]
    inside = [node for each in given for node in ast.walk(each)]
    calls = [node.func for node in inside if isinstance(node, ast.Call)]
    names = {each.attr if isinstance(each, ast.Attribute) else "" for each in calls}
    if any(isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield)) for node in inside):
        return None
    return inner if _REPEATABLE.issuperset(names) else None


def _reads(value: ast.expr) -> set[str]:
    """The names and attributes that an expression reads."""
    return {dotted(node) for node in ast.walk(value) if isinstance(node, (ast.Name, ast.Attribute))} - {""}


def _writes(statements: Sequence[ast.stmt], names: set[str]) -> bool:
    """Whether one of these statements may change what some names stand for: by assigning, or by working in place."""
    for node in (node for each in statements for node in ast.walk(each)):
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            inner: ast.expr = node
            while isinstance(inner, ast.Subscript):
                inner = inner.value
            if dotted(inner) in names:
                return True
        of_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        method = node.func if of_method and isinstance(node, ast.Call) else None
        in_place = isinstance(method, ast.Attribute) and method.attr.endswith("_")
        if in_place and isinstance(method, ast.Attribute) and not names.isdisjoint(_reads(method.value)):
            return True
    return False
