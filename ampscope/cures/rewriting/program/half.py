"""Modules, tensors and weights that a program keeps or makes in half precision are put into float32."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence

from ampscope.cures.rewriting.dtype_words import converted, with_dtype
from ampscope.cures.rewriting.edit import Edit, changed, diff_at, joined
from ampscope.cures.rewriting.names import NameScope, path_of
from ampscope.cures.rewriting.program.own_names import function_around, own_nodes
from ampscope.cures.rewriting.source_file import HasPlace, Row, SourceFile, source_file, statement_at
from ampscope.cures.rewriting.statement import dotted, statement


def kept_modules(place: HasPlace, modules: Mapping[int, Sequence[str]]) -> str | None:
    """The call of `ampscope.keep_fp32` before that of `ampscope.watch`, as a diff of the file.

    Args:
        place: The line that calls ``watch``, as it was recorded.
        modules: Names of the modules by the number of the model among those that are watched.

    Returns:
        The diff; None where the file is not at hand, and where it is not clear what the model is called there.
    """
    return _before_watch(place, {each: f"{{keep}}({{model}}, {_text(names)})" for each, names in modules.items()})


def widened(place: HasPlace, model: int, module: str) -> str | None:
    """A module converted to float32 before `ampscope.watch` is called, as a diff of the file; see `kept_modules`."""
    inner = f".get_submodule({_text(module)})" if module else ""
    return _before_watch(place, {model: f"{{model}}{inner}.float()"})


def watched(place: HasPlace) -> list[str]:
    """Returns the names of the models that the program gives ``watch``; empty where they are not seen."""
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
    """Returns the names of the models that a call of ``watch`` is given; empty where one has no name."""
    named = [each.value for each in call.keywords if each.arg == "model"]
    given = call.args[0] if call.args else next(iter(named), None)
    held = given.elts if isinstance(given, (ast.List, ast.Tuple)) else [given]
    names = [dotted(each) if each is not None else "" for each in held]
    return names if all(names) else []


def tensor_in_float32(written_at: HasPlace) -> str | None:
    """The tensor that a line writes, made in float32 where the program makes it, as a diff of the file.

    Args:
        written_at: The line that writes it: an assignment, or a method that works in place.

    Returns:
        The diff; None where it is not clear what is written, or where and in which dtype that is made.
    """
    source = source_file(written_at)
    tree = source.tree() if source is not None else None
    if source is None or tree is None:
        return None
    scope, line = _scope(tree, written_at.line), written_at.line
    statements = [node for node in ast.walk(scope) if isinstance(node, ast.stmt) and not hasattr(node, "body")]
    here = [node for node in statements if node.lineno <= line <= (node.end_lineno or 0)]
    written = {_held_in(scope, dotted(each), line): each for node in here for each in _written(node)}
    made = [
        node
        for node in statements
        if node not in here and isinstance(node, ast.Assign) and len(node.targets) == 1
        if len(written) == 1 and dotted(node.targets[0]) in written and dotted(node.targets[0])
    ]
    if len(made) != 1:
        return None
    return _made_wide(source, written_at.file, made[0])


def _scope(tree: ast.Module, line: int) -> ast.AST:
    """The class around a line, whose methods share what ``self`` holds; else the function, or the program."""
    around = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    around = [node for node in around if node.lineno <= line <= (node.end_lineno or 0)]
    return around[-1] if around else function_around(tree, line)


def _held_in(scope: ast.AST, name: str, line: int) -> str:
    """The list that a loop around a line takes a name's values from, alone or in a ``zip``; else the name itself."""
    for node in ast.walk(scope):
        if not isinstance(node, ast.For) or not node.body[0].lineno <= line <= (node.end_lineno or 0):
            continue
        if dotted(node.target) == name and dotted(node.iter):
            return dotted(node.iter)
        together = isinstance(node.iter, ast.Call) and dotted(node.iter.func) == "zip" and not node.iter.keywords
        if together and isinstance(node.iter, ast.Call) and isinstance(node.target, ast.Tuple):
            for each, source in zip(node.target.elts, node.iter.args, strict=False):
                if dotted(each) == name and dotted(source):
                    return dotted(source)
    return name


def _written(node: ast.stmt) -> Iterator[ast.expr]:
    """Yields the expressions that a statement writes to, without the subscripts of what is a part of it."""
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        found = node.targets if isinstance(node, ast.Assign) else [node.target]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        found = [node.value.func.value] if node.value.func.attr.endswith("_") else []
    else:
        found = []
    for each in found:
        inner = each
        while isinstance(inner, ast.Subscript) or _is_in_place(inner):
            inner = inner.value if isinstance(inner, ast.Subscript) else inner.func.value  # type: ignore[attr-defined]
        yield inner


def _is_in_place(node: ast.expr) -> bool:
    """Whether a part is what a method that works in place returned: ``x.mul_(0.9)`` of ``x.mul_(0.9).add_(y)``."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_")


def _made_wide(source: SourceFile, file: str, made: ast.Assign) -> str | None:
    """The statement that makes a tensor with float32 for the dtype that it names."""
    place = Row(file, made.lineno, source.code(made.lineno))
    return diff_at(place, lambda code, _, scope: converted(code, "float32", scope) or with_dtype(code, scope))


def weights_in_float32(watched_at: HasPlace) -> str | None:
    """The one model that ``watch`` is given, made in float32, as a diff of the file.

    Every statement that gives it its name, or calls a method of it, and names a half dtype gets float32; where none
    does, the model is converted before it is watched.

    Args:
        watched_at: The line that calls ``watch``, as it was recorded.

    Returns:
        The diff; None where the file is not at hand, and where it is not clear what the model is called there.
    """
    source, names = source_file(watched_at), watched(watched_at)
    tree = source.tree() if source is not None else None
    if source is None or tree is None or len(names) != 1:
        return None
    lines = sorted(set(_makes(tree, names[0], watched_at.line)))
    places = [Row(watched_at.file, line, source.code(line)) for line in lines]
    diffs = [diff for place in places if (diff := diff_at(place, _wide)) is not None]
    return joined(diffs) if diffs else widened(watched_at, 0, "")


def _wide(code: str, _: int | None, scope: NameScope | None) -> Edit | None:
    return converted(code, "float32", scope) or with_dtype(code, scope)


def _makes(tree: ast.Module, name: str, line: int) -> Iterator[int]:
    """The first lines of the statements that give a model its name, or call a method of it for its own sake."""
    inside = function_around(tree, line)
    for scope in dict.fromkeys([inside, tree]):
        for node in own_nodes(scope):
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if name in map(dotted, targets):
                    yield node.lineno
            elif isinstance(node, ast.Expr) and name == dotted(_root(node.value)):
                yield node.lineno


def _root(node: ast.expr) -> ast.expr:
    """Returns the object on which the first of a chain of methods is called."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    return node
