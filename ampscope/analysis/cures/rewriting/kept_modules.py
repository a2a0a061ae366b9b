"""Modules kept in float32, written where the program calls `ampscope.watch`, with its own name for the model."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence

from ampscope.analysis.cures.rewriting.changed_file import changed
from ampscope.analysis.cures.rewriting.source_file import HasPlace, statement_at
from ampscope.analysis.cures.rewriting.statement import dotted, statement


def kept(place: HasPlace, modules: Mapping[int, Sequence[str]]) -> str | None:
    """The call of `ampscope.keep_fp32` before that of `ampscope.watch`, as a diff of the file.

    Args:
        place: The line that calls ``watch``, as it was recorded.
        modules: Names of the modules by the number of the model among those that are watched.

    Returns:
        The diff; None where the file is not at hand, and where it is not clear what the model is called there.
    """
    found = statement_at(place)
    parsed = statement(found.code) if found is not None else None
    if found is None or parsed is None or parsed.before:
        return None
    calls = [node for node in parsed.nodes() if isinstance(node, ast.Call) and _is_watch(node)]
    models = _models(calls[0]) if len(calls) == 1 else []
    if not models or max(modules, default=len(models)) >= len(models):
        return None
    indent = found.source.indent(found.first)
    lines = [
        f"{indent}ampscope.keep_fp32({models[each]}, {json.dumps(list(names))})" for each, names in modules.items()
    ]
    return changed(found.source, place.file, [(found.first, found.first - 1, lines)], ("import ampscope",))


def _is_watch(call: ast.Call) -> bool:
    return dotted(call.func) in ("ampscope.watch", "watch")


def _models(call: ast.Call) -> list[str]:
    """What the program calls the models; empty where one has no name."""
    named = [each.value for each in call.keywords if each.arg == "model"]
    given = call.args[0] if call.args else next(iter(named), None)
    held = given.elts if isinstance(given, (ast.List, ast.Tuple)) else [given]
    names = [dotted(each) if each is not None else "" for each in held]
    return names if all(names) else []
