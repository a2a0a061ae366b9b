"""Reads the meanings of fields and columns from the ``#:`` comments behind them: each stands once, in the source."""

from __future__ import annotations

import ast
import inspect
import textwrap
import typing
from collections.abc import Iterator, Mapping
from functools import cache

from ampscope.trace.schema.tables import ROW_TYPES, Table, arrow_schema


@cache
def field_comments(described: type) -> Mapping[str, str]:
    """The comments behind the fields of a class, or the members of an enumeration, and what goes on below them.

    Args:
        described: The class; its bases are not looked at.

    Returns:
        By field, in their order; empty where one has none.
    """
    text = textwrap.dedent(inspect.getsource(described))
    [definition] = ast.parse(text).body
    assert isinstance(definition, ast.ClassDef)
    lines = text.splitlines()
    return {name: _comment(lines, last) for name, last in _fields(definition)}


@cache
def column_meanings() -> Mapping[Table, Mapping[str, str]]:
    """Returns the meaning of each column of each table.

    One without a comment means what the first column of that name means; a field that is itself a row type stands for
    the columns of that type.
    """
    first: dict[str, str] = {}
    found: dict[Table, dict[str, str]] = {}
    for table, row_type in ROW_TYPES.items():
        own = dict(_flat(row_type))
        found[table] = {name: own.get(name) or first.get(name, "") for name in arrow_schema(table).names}
        first |= {name: text for name, text in own.items() if text and name not in first}
    return found


def _flat(row_type: type) -> Iterator[tuple[str, str]]:
    types = typing.get_type_hints(row_type)
    for name, text in field_comments(row_type).items():
        yield from _flat(types[name]) if hasattr(types[name], "_fields") else [(name, text)]


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, int]]:
    """The fields of a class, each with the number of its last line."""
    for item in node.body:
        target: ast.expr | None = item.target if isinstance(item, ast.AnnAssign) else None
        if isinstance(item, ast.Assign):
            (target,) = item.targets
        if isinstance(target, ast.Name):
            yield target.id, item.end_lineno or item.lineno


def _comment(lines: list[str], last: int) -> str:
    """The comment at the end of the line with number ``last``, and the lines that go on with it."""
    parts = [lines[last - 1].partition("#:")[2]]
    for line in lines[last:]:
        if not parts[0] or not line.lstrip().startswith("#:"):
            break
        parts.append(line.partition("#:")[2])
    return " ".join(part.strip() for part in parts)
