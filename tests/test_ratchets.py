"""The rooms grow only on purpose, and what has no type only becomes less: the figures are in ``ratchets.toml``."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import APP, PACKAGE, ROOT

FIGURES = ROOT / "tests" / "ratchets.toml"
#: A share of a figure that the code may be below it before the figure has to follow.
SLACK = 0.01


def documentation(tree: ast.Module) -> Iterator[int]:
    """The lines of docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


def lines_of_code(source: str) -> int:
    """How many lines are neither empty nor a comment nor part of a docstring."""
    passed_over = set(documentation(ast.parse(source)))
    lines = enumerate(map(str.strip, source.splitlines()), start=1)
    return sum(1 for number, line in lines if line and not line.startswith("#") and number not in passed_over)


def room(file: Path) -> str:
    """The folder below the package that a file is in, or the package or the app itself."""
    parts = file.relative_to(ROOT).parts
    return parts[0] if parts[0] == "app" or len(parts) == 2 else f"{parts[0]}/{parts[1]}"


def measured() -> dict[str, dict[str, int]]:
    """What ``ratchets.toml`` says, as it is."""
    code: Counter[str] = Counter()
    untyped: Counter[str] = Counter()
    for file in [*PACKAGE.rglob("*.py"), *APP.rglob("*.py")]:
        source = file.read_text("utf-8")
        code[room(file)] += lines_of_code(source)
        untyped["dict[str, Any]"] += source.count("dict[str, Any]")
        untyped["Any"] += len(re.findall(r"\bAny\b", source))
    return {"lines of code": dict(sorted(code.items())), "untyped": dict(untyped)}


def broken(figures: dict[str, dict[str, int]], found: dict[str, dict[str, int]]) -> list[str]:
    """A sentence for each figure that does not hold."""
    told = []
    for kind in figures.keys() | found.keys():
        allowed, real = figures.get(kind, {}), found.get(kind, {})
        for name in sorted(allowed.keys() | real.keys()):
            limit, now = allowed.get(name, 0), real.get(name, 0)
            if now > limit:
                told.append(f"{kind}, {name}: {now}, {limit} allowed; is there code that can go for it?")
            elif now < limit * (1 - SLACK):
                told.append(f"{kind}, {name}: {now}; write that in place of {limit}")
    return told


def test_the_figures_hold() -> None:
    found = broken(tomllib.loads(FIGURES.read_text("utf-8")), measured())
    assert not found, "\n".join([*found, f"{FIGURES} says how it is meant"])


def test_a_broken_figure_is_found() -> None:
    assert broken({"lines": {"a": 100}}, {"lines": {"a": 101}}) == [
        "lines, a: 101, 100 allowed; is there code that can go for it?"
    ]
    assert broken({"lines": {"a": 100}}, {"lines": {"a": 98}}) == ["lines, a: 98; write that in place of 100"]
    assert broken({"lines": {"a": 100}}, {"lines": {"a": 99}}) == []
    assert len(broken({"lines": {"gone": 100}}, {"lines": {"new": 1}})) == 2


def test_docstrings_and_comments_are_no_code() -> None:
    lines = [
        '"""A module.',
        "",
        'In two lines."""',
        "",
        "# Why.",
        'x = """text',
        '"""',
        "def f():",
        '    """It runs."""',
        "    f()",
    ]
    assert lines_of_code("\n".join(lines)) == 4
