"""Writes ``docs/trace-format.md`` from the schema: ``make docs``.

What a column or a value means stands once, as a comment behind it in the source (``#:``); comments are gone at run
time, so this reads the source.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from ampscope.trace import vocabulary
from ampscope.trace.read import older_versions
from ampscope.trace.schema import ROW_TYPES, SCHEMA_VERSION, Table, arrow_schema, audit_rows, enums, rows

PAGE = Path(__file__).with_name("trace-format.md")
TEXT = Path(__file__).with_name("trace-format.in.md")

#: Where the row types are.
ROWS = (rows, audit_rows)

#: By class and field: what the comment behind the field says.
Meanings = dict[str, dict[str, str]]


def meanings(module: ModuleType) -> Meanings:
    """The comments behind the fields of a module's classes; empty where a field has none."""
    source = inspect.getsource(module)
    lines = source.splitlines()
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {node.name: {name: _comment(lines, end) for name, end in _fields(node)} for node in classes}


def of_rows() -> Meanings:
    """The `meanings` of all row types."""
    return {name: said for module in ROWS for name, said in meanings(module).items()}


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


def columns(said: Meanings) -> dict[Table, dict[str, str]]:
    """What each column of each table means.

    Args:
        said: The `meanings` of the row types. One without a comment means what the first column of that name means; a
            field that is itself a row type of the module stands for the columns of that type.
    """
    first: dict[str, str] = {}
    found: dict[Table, dict[str, str]] = {}
    for table, row_type in ROW_TYPES.items():
        own = dict(_flat(row_type.__name__, said))
        found[table] = {name: own.get(name) or first.get(name, "") for name in arrow_schema(table).names}
        first |= {name: text for name, text in own.items() if text and name not in first}
    return found


def _flat(row_type: str, said: Meanings) -> Iterator[tuple[str, str]]:
    annotations = next(getattr(each, row_type) for each in ROWS if hasattr(each, row_type)).__annotations__
    for name, text in said[row_type].items():
        inner = str(getattr(annotations[name], "__forward_arg__", annotations[name]))
        yield from _flat(inner, said) if inner in said else [(name, text)]


def values() -> dict[str, dict[str, str]]:
    """By enumeration of the trace: what each of its values means."""
    said = meanings(enums) | {"MistakeForm": meanings(vocabulary)["MistakeForm"]}
    homes = {name: vocabulary if name == "MistakeForm" else enums for name in said}
    return {
        name: {getattr(homes[name], name)[member].value: text for member, text in members.items()}
        for name, members in said.items()
    }


def page() -> str:
    """The whole document."""
    parts = {
        "version": str(SCHEMA_VERSION),
        "tables": "\n".join(_table(table, said) for table, said in columns(of_rows()).items()),
        "enumerations": "\n".join(_enumeration(name, said) for name, said in values().items()),
        "older_versions": _in_markdown(inspect.cleandoc(older_versions.__doc__ or "").partition("\n\n")[2]),
    }
    text = TEXT.read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], text)


def _table(table: Table, said: dict[str, str]) -> str:
    lines = [
        f"### {table.value}",
        "",
        _in_markdown(inspect.cleandoc(ROW_TYPES[table].__doc__ or "")),
        "",
        "| column | type | may be null | meaning |",
        "|---|---|---|---|",
    ]
    for field in arrow_schema(table):
        kind = str(field.type).replace("list<item: ", "list<")
        null = "yes" if field.nullable else ""
        lines.append(f"| `{field.name}` | {_cell(f'`{kind}`')} | {null} | {_cell(_in_markdown(said[field.name]))} |")
    return "\n".join([*lines, ""])


def _enumeration(name: str, said: dict[str, str]) -> str:
    kind = getattr(vocabulary if name == "MistakeForm" else enums, name)
    rows_of_values = [f"| `{value}` | {_cell(_in_markdown(text))} |" for value, text in said.items() if value]
    empty = [f"\nEmpty: {text}." for value, text in said.items() if not value]
    about = _in_markdown(inspect.cleandoc(kind.__doc__ or ""))
    head = [f"### {name}", "", about, "", "| value | meaning |", "|---|---|"]
    return "\n".join([*head, *rows_of_values, *empty, ""])


def _in_markdown(text: str) -> str:
    """Code between single backticks; the name of an enumeration becomes a link to it, that of its value the value."""
    known = values()

    def linked(match: re.Match[str]) -> str:
        name, _, member = match[1].partition(".")
        if name not in known:
            return f"`{match[1]}`"
        if member:
            return f"`{getattr(enums, name)[member].value}`"
        return f"[{name}](#{name.lower()})"

    pieces = re.split(r"(``.+?``)", text)
    return "".join(
        f"`{piece[2:-2]}`" if piece.startswith("``") else re.sub(r"`([^`]+)`", linked, piece) for piece in pieces
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    sys.stdout.write(f"{PAGE}\n")
