"""The guides to frameworks: every row of their tables names tests that exist, and their code uses what there is."""

from __future__ import annotations

import ast
import importlib
import re

import pytest

from tests.support.paths import ROOT

HEADING = "## Setting by setting"
TEXTS = [path.read_text("utf-8") for path in sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = [text for text in TEXTS if HEADING in text]
FRAMEWORKS = ROOT / "tests" / "integration" / "frameworks"


def rows(text: str) -> list[list[str]]:
    """The table's rows, each as its cells; without the headings."""
    table = re.findall(r"^\| .* \|$", text.partition(HEADING)[2], re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table[1:]]


def named_tests(cell: str) -> list[tuple[str, str]]:
    """The tests that a cell names, as file and function."""
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cell)


def functions(file: str) -> set[str]:
    path = ROOT / file
    tree = ast.parse(path.read_text("utf-8")) if path.exists() else ast.Module([], [])
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


ROWS = [row for guide in GUIDES for row in rows(guide)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_every_row_names_tests_that_exist(row: list[str]) -> None:
    assert len(row) == 4
    tests = named_tests(row[-1])
    assert tests
    assert [f"{file}::{name}" for file, name in tests if name not in functions(file)] == []


def test_every_framework_that_is_tested_has_a_row() -> None:
    named = {file for row in ROWS for file, _ in named_tests(row[-1])}
    rooms = {path.parent for path in FRAMEWORKS.rglob("test_*.py")}
    untold = [room.name for room in rooms if not any((ROOT / file).parent == room for file in named)]
    assert untold == []


def test_what_it_imports_exists() -> None:
    imports = re.findall(r"^from (ampscope[\w.]+) import (\w+)$", "\n".join(TEXTS), re.MULTILINE)
    assert imports
    assert [name for home, name in imports if not hasattr(importlib.import_module(home), name)] == []


def test_a_row_without_a_test_is_noticed() -> None:
    table = (
        "## Setting by setting\n| setting | tests |\n|---|---|\n| one | `tests/gone.py::test_it` |\n| two | none |\n"
    )
    one, two = rows(table)
    assert named_tests(one[-1]) == [("tests/gone.py", "test_it")]
    assert functions("tests/gone.py") == set()
    assert named_tests(two[-1]) == []
