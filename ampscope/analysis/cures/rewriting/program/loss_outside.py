"""The loss taken out of the autocast region of its model's call, and computed from the output in float32."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ampscope.analysis.cures.rewriting.changed_file import changed
from ampscope.analysis.cures.rewriting.program.autocast_region import entered, makes_region
from ampscope.analysis.cures.rewriting.program.own_names import function_around
from ampscope.analysis.cures.rewriting.source_file import HasPlace, SourceFile, source_file
from ampscope.analysis.cures.rewriting.statement import dotted

#: What the output of a model is called whose call is a part of the loss's line.
_OUTPUT = "output"


class _Place(NamedTuple):
    """A statement in an autocast region, and the call of the model in it."""

    source: SourceFile
    region: ast.With
    statement: ast.stmt
    after: list[ast.stmt]  #: what follows it in the region
    call: ast.Call

    @property
    def names(self) -> list[str]:
        """The names that the outputs get, where the statement does nothing else; empty where it does more."""
        node = self.statement
        if not isinstance(node, ast.Assign) or len(node.targets) != 1 or node.value is not self.call:
            return []
        target = node.targets[0]
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        names = [each.id for each in parts if isinstance(each, ast.Name)]
        return names if len(names) == len(parts) else []

    @property
    def moved(self) -> list[ast.stmt]:
        """What is to stand after the region."""
        return self.after if self.names else [self.statement, *self.after]


def in_float32(called_at: HasPlace, models: Sequence[str], tensors: int) -> str | None:
    """What follows a model's call in its autocast region, after the region, with the output in float32.

    Args:
        called_at: The line that calls the model under autocast, as it was recorded.
        models: What the program calls its models: one of them is called there.
        tensors: How many tensors the call returned, one or a tuple of them; 0 for anything else.

    Returns:
        A diff of the file; None where it is not at hand, where the region is not one around plain statements alone, and
        where the loss reads something else than these tensors from in there.
    """
    place = _place(called_at, models)
    if place is None or not place.moved or not _can_move(place) or tensors != (len(place.names) or 1):
        return None
    first, last = place.statement.lineno, place.region.end_lineno or 0
    return changed(place.source, called_at.file, [(first, last, list(_lines(place)))])


def _place(called_at: HasPlace, models: Sequence[str]) -> _Place | None:
    source = source_file(called_at)
    tree = source.tree() if source is not None else None
    if source is None or tree is None:
        return None
    line = called_at.line
    blocks = [node for node in ast.walk(function_around(tree, line)) if isinstance(node, ast.With)]
    blocks = [node for node in blocks if node.body[0].lineno <= line <= (node.end_lineno or 0)]
    if not blocks or len(blocks[-1].items) != 1:
        return None
    region = blocks[-1]
    here = [each for each in region.body if each.lineno <= line <= (each.end_lineno or 0)]
    called = [(each, node) for each in region.body for node in ast.walk(each) if isinstance(node, ast.Call)]
    called = [(each, node) for each, node in called if dotted(node.func) in models]
    regions = [each for each in entered(tree, line) if makes_region(tree, each, region.lineno)]
    is_region = regions == [region.items[0].context_expr]  # a second one around it would hold the loss still
    if len(called) != 1 or here != [called[0][0]] or not is_region:
        return None
    (statement, call), number = called[0], region.body.index(here[0])
    return _Place(source, region, statement, region.body[number + 1 :], call)


def _can_move(place: _Place) -> bool:
    """Whether the lines can stand after the region as they are."""
    firsts = [node.lineno for node in (place.region, *place.region.body)]
    is_plain = all(isinstance(each, (ast.Assign, ast.AugAssign, ast.Expr)) for each in place.moved)
    parts = [node for each in place.moved for node in ast.walk(each)]
    texts = [node for node in parts if isinstance(node, (ast.Constant, ast.JoinedStr))]
    is_of_lines = all(node.lineno == node.end_lineno for node in texts)  # a longer text's lines are part of it
    number = place.region.body.index(place.statement)
    before = {name for each in place.region.body[:number] for name in _stored(each)}
    read = {node.id for node in parts if isinstance(node, ast.Name)}
    is_free = bool(place.names) or (_OUTPUT not in read and place.call.lineno == place.call.end_lineno)
    return is_plain and is_of_lines and is_free and len(set(firsts)) == len(firsts) and before.isdisjoint(read)


def _stored(statement: ast.stmt) -> Iterator[str]:
    names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
    return (node.id for node in names if isinstance(node.ctx, ast.Store))


def _lines(place: _Place) -> Iterator[str]:
    """The lines from the model's call to the end of the region, as they are to be."""
    source, statement = place.source, place.statement
    first, last = statement.lineno, statement.end_lineno or 0
    inner, outer = source.indent(first), source.indent(place.region.lineno)
    own = [line.rstrip("\r\n") for line in source.lines[first - 1 : last]]
    rest = [line.rstrip("\r\n") for line in source.lines[last : place.region.end_lineno]]
    if len(place.names) == 1:
        end = (place.call.end_lineno or 0) - first
        column = place.call.end_col_offset or 0
        own[end] = f"{_cut(own[end], 0, column)}.float(){_cut(own[end], column)}"
        yield from own
    elif place.names:
        yield from own
        yield f"{outer}{', '.join(place.names)} = {', '.join(f'{each}.float()' for each in place.names)}"
    else:
        row = place.call.lineno - first
        start, end = place.call.col_offset, place.call.end_col_offset or 0
        yield f"{inner}{_OUTPUT} = {_cut(own[row], start, end)}"
        own[row] = f"{_cut(own[row], 0, start)}{_OUTPUT}.float(){_cut(own[row], end)}"
        rest = [*own, *rest]
    yield from (f"{outer}{line.removeprefix(inner)}" if line.startswith(inner) else line for line in rest)


def _cut(line: str, start: int, end: int | None = None) -> str:
    """A part of a line, counted in bytes as `ast` does."""
    return line.encode()[start:end].decode()
