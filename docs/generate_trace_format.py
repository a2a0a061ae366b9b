"""Writes ``docs/trace-format.md`` from the schema: ``make docs``.

What a column or a value means stands once, as a comment behind it in the source
(`ampscope.trace.schema.tables`).
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ampscope.trace import vocabulary
from ampscope.trace.read import older_versions
from ampscope.trace.schema import ROW_TYPES, SCHEMA_VERSION, Table, arrow_schema, enums
from ampscope.trace.schema.tables import column_meanings, field_comments

PAGE = Path(__file__).with_name("trace-format.md")
TEXT = Path(__file__).with_name("trace-format.in.md")


def values() -> dict[str, dict[str, str]]:
    """By enumeration of the trace: what each of its values means."""
    held: list[Any] = [*vars(enums).values()]
    told: list[Any] = [each for each in held if inspect.isclass(each) and each.__module__ == enums.__name__]
    return {
        each.__name__: {each[member].value: text for member, text in field_comments(each).items()}
        for each in [*told, vocabulary.MistakeForm]
    }


def page() -> str:
    """The whole document."""
    parts = {
        "version": str(SCHEMA_VERSION),
        "tables": "\n".join(_table(table, said) for table, said in column_meanings().items()),
        "enumerations": "\n".join(_enumeration(name, said) for name, said in values().items()),
        "older_versions": _in_markdown(inspect.cleandoc(older_versions.__doc__ or "").partition("\n\n")[2]),
    }
    text = TEXT.read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], text)


def _table(table: Table, said: Mapping[str, str]) -> str:
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


def _enumeration(name: str, said: Mapping[str, str]) -> str:
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
