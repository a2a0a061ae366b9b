"""A statement with the softmax, sigmoid or mean that an earlier statement of its function gave a name, written out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ampscope.cures.rewriting.edit import Edit
from ampscope.cures.rewriting.found_call import TorchCall, as_call, found_calls
from ampscope.cures.rewriting.names import scope_at
from ampscope.cures.rewriting.program.own_names import function_around, own_nodes
from ampscope.cures.rewriting.source_file import HasPlace, SourceFile, source_file
from ampscope.cures.rewriting.statement import CONVERSIONS, Statement, dotted, is_repeatable, statement

_PROBABILITIES = ("softmax", "sigmoid")
MEANS = ("mean",)
#: Exponentials, and what picks some of them.
EXPONENTIALS = ("exp", "diagonal", "diag", "sum")
#: How often a value may be made of one with a name of its own.
_DEEPEST = 3


class Named(NamedTuple):
    """An operand of an earlier statement that cannot be computed a second time, and is to have a name instead."""

    line: int  #: that of the statement, which is its whole
    code: str
    edit: Edit  #: gives it the name before, and reads it there


class WrittenOut(NamedTuple):
    """A statement with probabilities in the place of their names."""

    code: str
    named: tuple[Named, ...] = ()  #: what this takes in earlier statements
    texts: tuple[tuple[str, str], ...] = ()  #: each name with what stands in its place

    def named_again(self, code: str) -> str:
        """The statement, changed, with the names that it had for what still stands there."""
        for name, text in self.texts:
            code = re.sub(rf"(?<![\w.]){re.escape(text)}", name, code)
        return code


def written_out(parsed: Statement, place: HasPlace, call: str) -> WrittenOut | None:
    """A statement in which calls read a probability by name, with the probability itself in its place.

    Args:
        parsed: The statement.
        place: A line of it, as it was recorded.
        call: The function that reads it: ``log``, ``binary_cross_entropy``.

    Returns:
        What it becomes; None where one of the calls reads none, and where a name may stand for something else by then.
    """
    source = source_file(place)
    tree = source.tree() if source is not None else None
    if source is None or tree is None:
        return None
    read = [_names(each.operand(0)) for each in found_calls(parsed, call)]
    known = {node.id: _value(source, tree, node.id, place.line) for names in read for node in names}
    splices = [parsed.instead(node, value.text) for names in read for node in names if (value := known[node.id])]
    if not all(any(known[node.id] for node in names) for names in read):
        return None  # the one that reads something else may be the one that is meant
    code = parsed.changed(splices) if splices else None
    named = tuple(value.named for value in known.values() if value is not None and value.named is not None)
    return WrittenOut(code, named) if code is not None else None


def values_written_out(parsed: Statement, place: HasPlace, functions: tuple[str, ...]) -> WrittenOut | None:
    """A statement with what these functions gave in the place of its names.

    Args:
        parsed: The statement.
        place: A line of it, as it was recorded.
        functions: `MEANS`, or others.

    Returns:
        What it becomes; None where it names nothing that is known to be such a value.
    """
    source = source_file(place)
    tree = source.tree() if source is not None else None
    if source is None or tree is None:
        return None
    texts: dict[str, str] = {}
    code: str | None = None
    for _ in range(_DEEPEST):
        read = [node for node in parsed.nodes() if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
        known = {node.id: _value(source, tree, node.id, place.line, functions) for node in read}
        splices = [parsed.instead(node, value.text) for node in read if (value := known[node.id]) is not None]
        changed = parsed.changed(splices) if splices else None
        again = statement(changed, parsed.row, parsed.scope) if changed is not None else None
        if changed is None or again is None:
            break
        code, parsed = changed, again
        texts = {**{name: value.text for name, value in known.items() if value is not None}, **texts}
    return WrittenOut(code, texts=tuple(texts.items())) if code is not None else None


def _names(operand: ast.expr | None) -> list[ast.Name]:
    return [node for node in ast.walk(operand) if isinstance(node, ast.Name)] if operand is not None else []


class _Value(NamedTuple):
    """The probability, or mean, that a name stands for."""

    text: str
    named: Named | None  #: where its operand gets a name of its own


def _value(
    source: SourceFile, tree: ast.Module, name: str, line: int, functions: tuple[str, ...] = _PROBABILITIES
) -> _Value | None:
    """The result of one of these functions that a name stands for on a line; None where it is not known to be one."""
    scope = function_around(tree, line)
    stored = [node for node in own_nodes(scope) if isinstance(node, ast.Name) and node.id == name]
    if sum(not isinstance(node.ctx, ast.Load) for node in stored) != 1:
        return None
    for block, here in _blocks_around(scope, line):
        for number, node in enumerate(block[:here]):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and dotted(node.targets[0]) == name:
                return _assigned(source, node, name, block[number + 1 : here + 1], functions)
    return None


def _assigned(
    source: SourceFile, node: ast.Assign, name: str, since: Sequence[ast.stmt], functions: tuple[str, ...]
) -> _Value | None:
    """The value of an assignment, where what it reads is the same after these statements."""
    found = _given_by(node.value, functions)
    operand = found.operand(0) if found is not None else None
    text = ast.get_source_segment(source.text, found.node) if found is not None else None
    if found is None or operand is None or text is None or "\n" in text:
        return None
    others = [*found.operands, *(each.value for each in found.keywords.values())]
    others = [each for each in others if each is not operand]
    read_again = [*others, *([operand] if is_repeatable(operand) else [])]
    if not all(map(is_repeatable, others)) or _writes(since, {read for each in read_again for read in _reads(each)}):
        return None
    if operand in read_again:
        return _Value(text, None)
    return _with_name(source, node.lineno, f"{name}_logits") if functions == _PROBABILITIES else None


def _with_name(source: SourceFile, line: int, name: str) -> _Value | None:
    """A probability whose operand gets a name of its own, before the statement that assigns it."""
    code, tree = source.code(line), source.tree()
    before = statement(code, scope=scope_at(tree, line)) if tree is not None else None
    given = _of_statement(before)
    operand = given.operand(0) if given is not None else None
    if before is None or operand is None:
        return None
    after = before.changed([before.instead(operand, name)])
    again = statement(after) if after is not None else None
    found = _of_statement(again)
    if after is None or again is None or found is None or not isinstance(found.node, ast.expr):
        return None
    edit = Edit(code, after, first=(f"{name} = {before.text(operand)}",))
    return _Value(again.text(found.node), Named(line, code, edit))


def _of_statement(parsed: Statement | None) -> TorchCall | None:
    """The probability that a statement, which is one line, gives a name."""
    body = parsed.tree.body if parsed is not None else []
    return _given_by(body[0].value, _PROBABILITIES) if len(body) == 1 and isinstance(body[0], ast.Assign) else None


def _blocks_around(scope: ast.AST, line: int) -> Iterator[tuple[list[ast.stmt], int]]:
    """The blocks that hold a line, from the outside, each with the place of the statement in which it is."""
    for node in ast.walk(scope):
        for _, held in ast.iter_fields(node):
            if isinstance(held, list) and held and all(isinstance(each, ast.stmt) for each in held):
                for number, each in enumerate(held):
                    if each.lineno <= line <= (each.end_lineno or 0):
                        yield held, number


def _given_by(value: ast.expr, functions: tuple[str, ...]) -> TorchCall | None:
    """A call of one of these functions, without conversions after it."""
    inner = value
    while isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr in CONVERSIONS:
        inner = inner.func.value
    return as_call(inner, *functions)


def _reads(value: ast.expr) -> set[str]:
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
