"""Another dtype for autocast, or none, written where the program enters the region around its model's call."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ampscope.analysis.cures.rewriting.forms.constants import added_keyword
from ampscope.analysis.cures.rewriting.names.scopes import Reached, scope_at
from ampscope.analysis.cures.rewriting.program.own_names import assigned_once, function_around, imported_name
from ampscope.analysis.cures.rewriting.program.spliced_file import spliced, whole
from ampscope.analysis.cures.rewriting.source_file import HasPlace, SourceFile, source_file
from ampscope.analysis.cures.rewriting.statement import Splice, dotted

#: The classes that are autocast regions, with the places of their dtype and of their switch among the arguments.
_REGIONS = {
    "torch.autocast": (1, 2),
    "torch.amp.autocast": (1, 2),
    "torch.amp.autocast_mode.autocast": (1, 2),
    "ampscope.autocast": (1, 2),
    "torch.cuda.amp.autocast": (1, 0),
    "torch.cpu.amp.autocast": (1, 0),
}


class Region(NamedTuple):
    """Where a program makes an autocast region."""

    source: SourceFile
    call: ast.Call
    dtype: int  #: place of its dtype among the arguments
    switch: int  #: place of ``enabled``


def in_dtype(called_from: Sequence[HasPlace], dtype: str) -> str | None:
    """Every autocast region around the calls of the models in another dtype, or switched off.

    Args:
        called_from: The lines that call the models under autocast.
        dtype: ``bfloat16``, or ``float32`` for none.

    Returns:
        The diff; None where one of the regions is not found, where they stand in several files, or already are so.
    """
    found = [region_around(place) for place in called_from]
    regions = {(each.source.path, each.call.lineno, each.call.col_offset): each for each in found if each is not None}
    if None in found or len({path for path, *_ in regions}) != 1:
        return None
    texts = [_text(each, dtype) for each in regions.values()]
    changes = [_changed(each, dtype, text.text) for each, text in zip(regions.values(), texts, strict=True) if text]
    splices = [each for each in changes if each is not None]
    if len(splices) < len(regions):
        return None
    source = next(iter(regions.values())).source
    needed = {each: None for text in texts if text is not None for each in text.imports}
    return spliced(source, called_from[0].file, splices, list(needed))


def region_around(place: HasPlace) -> Region | None:
    """The innermost autocast region that a program enters around a line, in the function that the line is in."""
    source = source_file(place)
    tree = source.tree() if source is not None else None
    if source is None or tree is None:
        return None
    for expression in reversed(list(entered(tree, place.line))):
        call = _made(tree, expression, place.line)
        if call is not None:
            return Region(source, call, *_REGIONS[imported_name(tree, call.func)])
    return None


def is_entered(place: HasPlace) -> bool:
    """Whether the function around a line enters an autocast region anywhere."""
    source = source_file(place)
    tree = source.tree() if source is not None else None
    if tree is None:
        return False
    parts = ast.walk(function_around(tree, place.line))
    blocks = [each for each in parts if isinstance(each, (ast.With, ast.AsyncWith))]
    entered = [(item.context_expr, each.lineno) for each in blocks for item in each.items]
    return any(_made(tree, expression, line) is not None for expression, line in entered)


def makes_region(tree: ast.Module, expression: ast.expr, line: int) -> bool:
    """Whether what a ``with`` on a line enters is an autocast region, by what the program has imported."""
    return _made(tree, expression, line) is not None


def entered(tree: ast.Module, line: int) -> Iterator[ast.expr]:
    """What the decorators and ``with`` blocks around a line enter, from the outside; of its own function alone."""
    function = function_around(tree, line)
    yield from getattr(function, "decorator_list", ())
    for node in ast.walk(function):
        if isinstance(node, (ast.With, ast.AsyncWith)) and node.body[0].lineno <= line <= (node.end_lineno or 0):
            yield from (item.context_expr for item in node.items)


def _made(tree: ast.Module, expression: ast.expr, line: int) -> ast.Call | None:
    """The call that makes a region: what is entered, or what was given the name that is."""
    value = assigned_once(tree, dotted(expression), line) if isinstance(expression, ast.Name) else expression
    found = ast.walk(value) if value is not None else ()
    calls = [node for node in found if isinstance(node, ast.Call) and imported_name(tree, node.func) in _REGIONS]
    return calls[0] if len(calls) == 1 else None


def _text(region: Region, dtype: str) -> Reached | None:
    """What is written for a dtype where a region is made; None where the program cannot name it there."""
    tree = region.source.tree()
    if dtype == "float32" or tree is None:
        return Reached("False")
    return scope_at(tree, region.call.lineno).reached(f"torch.{dtype}")


def _changed(region: Region, dtype: str, text: str) -> Splice | None:
    """The dtype, or the switch, of a region as it is to be."""
    program = whole(region.source)
    name, place = ("enabled", region.switch) if dtype == "float32" else ("dtype", region.dtype)
    given = {each.arg: each.value for each in region.call.keywords}
    if program is None or None in given or any(isinstance(each, ast.Starred) for each in region.call.args):
        return None
    there = region.call.args[place] if place < len(region.call.args) else given.get(name)
    if there is None:
        return added_keyword(program, region.call, f"{name}={text}")
    return program.instead(there, text)
