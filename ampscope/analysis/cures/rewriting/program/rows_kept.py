"""The rows of a batch that are not finite left out, where a loop takes the batch."""

from __future__ import annotations

import ast
import re

from ampscope.analysis.cures.rewriting.edit import changed
from ampscope.analysis.cures.rewriting.program.own_names import function_around
from ampscope.analysis.cures.rewriting.source_file import HasPlace, source_file
from ampscope.analysis.cures.rewriting.statement import dotted

_KEPT = "good"
#: An argument of a model's call, as a trace names it.
_BY_PLACE, _BY_NAME = re.compile(r"args\[(\d+)\]"), re.compile(r"kwargs\['(\w+)'\]|(\w+)")


def finite_alone(called_at: HasPlace, models: list[str], argument: str) -> str | None:
    """The finite rows of a batch alone, before a loop gives them to its model.

    Args:
        called_at: The line of the loop that calls the model, as it was recorded.
        models: What the program calls its models.
        argument: The argument that is not finite, as the trace names it: ``args[0]``.

    Returns:
        A diff of the file; None where it is not at hand, and where what the model is given is not one of several names
        that the loop gives the parts of its batch.
    """
    source = source_file(called_at)
    tree = source.tree() if source is not None else None
    if source is None or tree is None or re.search(rf"\b{_KEPT}\b", source.text):
        return None
    line = called_at.line
    inside = list(ast.walk(function_around(tree, line)))
    calls = [node for node in inside if isinstance(node, ast.Call) and dotted(node.func) in models]
    calls = [node for node in calls if node.lineno <= line <= (node.end_lineno or 0)]
    loops = [node for node in inside if isinstance(node, ast.For) and node.body[0].lineno <= line]
    loops = [node for node in loops if line <= (node.end_lineno or 0)]
    given = _given(calls[0], argument) if len(calls) == 1 else ""
    names = _batch(loops[-1].target, given) if loops and given else []
    if not names:
        return None
    at = next(each for each in loops[-1].body if each.lineno <= line <= (each.end_lineno or 0))
    before = _moved(loops[-1].body[0], at, names).lineno
    rows = _rows(source.indent(before), given, names)
    return changed(source, called_at.file, [(before, before - 1, rows)]) if before > loops[-1].lineno else None


def _moved(first: ast.stmt, at: ast.stmt, names: list[str]) -> ast.stmt:
    """Before which statement all the names lie on one device: the first, where one is moved as late as the call."""
    calls = [node.func for node in ast.walk(at) if isinstance(node, ast.Call)]
    late = {dotted(each.value) for each in calls if isinstance(each, ast.Attribute) and each.attr in ("to", "cuda")}
    return first if late.intersection(names) else at


def _given(call: ast.Call, argument: str) -> str:
    """The name of what a call gives for an argument; empty where it is none."""
    place, name = _BY_PLACE.fullmatch(argument), _BY_NAME.fullmatch(argument)
    found: ast.expr | None = None
    if place is not None:
        number = int(place[1])
        found = call.args[number] if number < len(call.args) else None
    elif name is not None:
        found = next((each.value for each in call.keywords if each.arg in name.groups()), None)
    return found.id if isinstance(found, ast.Name) else ""


def _batch(target: ast.expr, name: str) -> list[str]:
    """The names of the parts of a batch, in a loop's target with this one among them; empty where it is not there."""
    for node in ast.walk(target):
        if isinstance(node, (ast.Tuple, ast.List)) and node.elts:
            names = [each.id if isinstance(each, ast.Name) else "" for each in node.elts]
            if name in names and all(names) and len(names) > 1:
                return names
    return []


def _rows(indent: str, name: str, names: list[str]) -> list[str]:
    kept = ", ".join(f"{each}[{_KEPT}]" for each in names)
    return [f"{indent}{_KEPT} = {name}.flatten(1).isfinite().all(1)", f"{indent}{', '.join(names)} = {kept}"]
