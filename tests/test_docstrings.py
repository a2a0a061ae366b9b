"""The first sentence of a docstring can be understood alone: it begins with no word that refers to another sentence."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.paths import ROOT, modules

#: Words by which a sentence hangs on something said elsewhere.
RELATIVE = frozenset({"what", "of", "as", "those", "where", "which", "that", "likewise", "whose"})


def documented(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the line and the docstring of everything in a module that has one."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def hanging(source: str) -> list[tuple[int, str]]:
    """Lists the docstrings of a module whose first word is a relative one."""
    found = documented(ast.parse(source))
    return [(line, text) for line, text in found if text.split()[0].strip("`*,.:;").lower() in RELATIVE]


def test_first_sentences_stand_alone() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line} {text.splitlines()[0]}"
        for file in modules().values()
        for line, text in hanging(file.read_text("utf-8"))
    ]
    assert found == []


def test_a_sentence_that_hangs_on_another_is_found() -> None:
    source = (
        'def f():\n    """What it was."""\n\nclass A:\n    """A step."""\n\n    def g(self):\n        """Of `f`."""\n'
    )
    assert [line for line, _ in hanging(source)] == [1, 7]
