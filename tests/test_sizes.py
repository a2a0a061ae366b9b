"""Nothing grows past what a reader takes in at a glance: folders, files, functions and classes of package and app.

A class that has to be larger says why in a sentence of its docstring that contains "attributes because" or
"methods because". The fields of a named tuple are not counted: they are the columns of a table, which the format of the
trace decides. Nor is a function's docstring: it is long where there is much to say to its callers.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.paths import ROOT, modules

#: Files and folders in one folder, at most.
MOST_ENTRIES = 14
#: Lines of one file, and of one function.
MOST_LINES, MOST_FUNCTION_LINES = 300, 45
#: Attributes that the instances of one class have, and methods that it defines.
MOST_ATTRIBUTES, MOST_METHODS = 15, 20

Function = ast.FunctionDef | ast.AsyncFunctionDef


def too_large() -> dict[str, int]:
    """The size of everything in package and app that is larger than it may be, by its full name."""
    return dict(found for name, file in modules().items() for found in oversized(name, file.read_text("utf-8")))


def oversized(module: str, source: str) -> Iterator[tuple[str, int]]:
    """What is too large in one module, and how large it is."""
    lines = len(source.splitlines())
    if lines > MOST_LINES:
        yield module, lines
    for name, node in definitions(module, ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            yield from oversized_class(name, node)
        elif function_lines(node) > MOST_FUNCTION_LINES:
            yield name, function_lines(node)


def definitions(prefix: str, node: ast.AST) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """The functions and classes in ``node`` by their full names, all the way down."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            name = f"{prefix}.{child.name}"
            yield name, child
            yield from definitions(name, child)
        else:
            yield from definitions(prefix, child)


def function_lines(node: Function) -> int:
    """From ``def`` to the end, without the docstring."""
    lines = (node.end_lineno or 0) - node.lineno + 1
    if ast.get_docstring(node) is None:
        return lines
    return lines - ((node.body[0].end_lineno or 0) - node.body[0].lineno + 1)


def oversized_class(name: str, node: ast.ClassDef) -> Iterator[tuple[str, int]]:
    reasons = " ".join((ast.get_docstring(node) or "").split())
    methods = [each for each in node.body if isinstance(each, Function) and not is_overload(each)]
    sizes = {"attributes": (len(attributes(node, methods)), MOST_ATTRIBUTES), "methods": (len(methods), MOST_METHODS)}
    for what, (size, most) in sizes.items():
        if size > most and f"{what} because" not in reasons:
            yield f"{name} {what}", size


def is_overload(node: Function) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "overload" for each in node.decorator_list)


def attributes(node: ast.ClassDef, methods: list[Function]) -> set[str]:
    """The fields that a class declares, and what its methods assign to ``self``."""
    row = any(isinstance(base, ast.Name) and base.id == "NamedTuple" for base in node.bases)
    declared = {
        each.target.id
        for each in ([] if row else node.body)
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        if "ClassVar" not in ast.unparse(each.annotation)
    }
    stored = (each for method in methods for each in ast.walk(method) if isinstance(each, ast.Attribute))
    return declared | {
        each.attr
        for each in stored
        if isinstance(each.ctx, ast.Store) and isinstance(each.value, ast.Name) and each.value.id == "self"
    }


def test_nothing_is_too_large() -> None:
    assert too_large() == {}


@pytest.mark.parametrize("top", ["ampscope", "app", "tests", "benchmarks", "docs"])
def test_a_folder_can_be_taken_in_at_a_glance(top: str) -> None:
    tracked = subprocess.run(["git", "ls-files", top], capture_output=True, text=True, check=False, cwd=ROOT).stdout
    held: dict[Path, set[str]] = {}
    for line in tracked.splitlines():
        parts = Path(line).parts
        for depth in range(1, len(parts)):
            held.setdefault(Path(*parts[:depth]), set()).add(parts[depth])
    assert {str(folder): len(names) for folder, names in held.items() if len(names) > MOST_ENTRIES} == {}


def sized(source: str) -> list[tuple[str, int]]:
    return list(oversized("m", dedent(source)))


def test_a_long_file_is_found() -> None:
    assert sized("x = 1\n" * MOST_LINES) == []
    assert sized("x = 1\n" * (MOST_LINES + 1)) == [("m", MOST_LINES + 1)]


def test_a_long_function_is_found_and_its_docstring_is_not_counted() -> None:
    body = "    x = 1\n" * (MOST_FUNCTION_LINES - 1)
    assert sized(f"def f():\n    '''One\n\n    two.\n    '''\n{body}") == []
    assert sized(f"class A:\n  def f(self):\n{body}    x = 1\n") == [("m.A.f", MOST_FUNCTION_LINES + 1)]


def test_many_attributes_are_found_where_no_reason_is_given() -> None:
    fields = "".join(f"    a{number}: int\n" for number in range(MOST_ATTRIBUTES))
    stored = "    def f(self):\n        self.a0, self.b = 1, 2\n"
    assert sized(f"class A:\n{fields}    c: ClassVar[int] = 1\n") == []
    assert sized(f"class A(NamedTuple):\n{fields}    c: int\n") == []
    assert sized(f"class A:\n{fields}{stored}") == [("m.A attributes", MOST_ATTRIBUTES + 1)]
    assert sized(f"class A:\n    '''So many attributes\n    because it is a row.'''\n{fields}{stored}") == []


def test_many_methods_are_found_where_no_reason_is_given() -> None:
    methods = "".join(f"    def f{number}(self): ...\n" for number in range(MOST_METHODS))
    overload = "    @overload\n    def g(self): ...\n"
    assert sized(f"class A:\n{methods}{overload}") == []
    assert sized(f"class A:\n{methods}    def g(self): ...\n") == [("m.A methods", MOST_METHODS + 1)]
