"""Modules kept in float32, written where the program calls `ampscope.watch`, with its own name for the model."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence

from ampscope.analysis.cures.rewriting.changed_file import changed
from ampscope.analysis.cures.rewriting.names.known import path_of
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
    return _before_watch(place, {each: f"{{keep}}({{model}}, {_text(names)})" for each, names in modules.items()})


def widened(place: HasPlace, model: int, module: str) -> str | None:
    """A module converted to float32 before `ampscope.watch` is called, as a diff of the file; see `kept`."""
    inner = f".get_submodule({_text(module)})" if module else ""
    return _before_watch(place, {model: f"{{model}}{inner}.float()"})


def watched(place: HasPlace) -> list[str]:
    """What the program calls the models that it gives ``watch``; empty where that is not seen."""
    found = statement_at(place)
    parsed = statement(found.code, scope=found.scope) if found is not None else None
    calls = [node for node in parsed.nodes() if isinstance(node, ast.Call) and _is_watch(node)] if parsed else []
    return _models(calls[0]) if len(calls) == 1 else []


def _text(value: str | Sequence[str]) -> str:
    """A name, or several, as code that is a template."""
    return json.dumps(value if isinstance(value, str) else list(value)).replace("{", "{{").replace("}", "}}")


def _before_watch(place: HasPlace, code: Mapping[int, str]) -> str | None:
    """Lines before the call of ``watch``: templates with ``model`` and ``keep`` in them, by the model's number."""
    found = statement_at(place)
    parsed = statement(found.code, scope=found.scope) if found is not None else None
    if found is None or parsed is None or parsed.before or len(parsed.tree.body) != 1:
        return None
    calls = [node for node in parsed.nodes() if isinstance(node, ast.Call) and _is_watch(node)]
    models = _models(calls[0]) if len(calls) == 1 else []
    if not models or max(code, default=len(models)) >= len(models):
        return None
    given = {node.id for node in parsed.nodes() if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    keep = found.scope.reached("ampscope.keep_fp32")
    if keep is None or any(each.partition(".")[0] in given for each in models):
        return None
    indent = found.source.indent(found.first)
    lines = [f"{indent}{each.format(keep=keep.text, model=models[number])}" for number, each in code.items()]
    imports = keep.imports if any("{keep}" in each for each in code.values()) else ()
    return changed(found.source, place.file, [(found.first, found.first - 1, lines)], imports)


def _is_watch(call: ast.Call) -> bool:
    return path_of(call.func) == "ampscope.watch"


def _models(call: ast.Call) -> list[str]:
    """What the program calls the models; empty where one has no name."""
    named = [each.value for each in call.keywords if each.arg == "model"]
    given = call.args[0] if call.args else next(iter(named), None)
    held = given.elts if isinstance(given, (ast.List, ast.Tuple)) else [given]
    names = [dotted(each) if each is not None else "" for each in held]
    return names if all(names) else []
