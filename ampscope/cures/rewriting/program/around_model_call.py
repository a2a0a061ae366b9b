"""A program is changed around its model's call: autocast's dtype, the loss outside of it, rows that are left out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ampscope.cures.rewriting.edit import changed
from ampscope.cures.rewriting.literals import added_keyword
from ampscope.cures.rewriting.names import Reached, scope_at
from ampscope.cures.rewriting.program.own_names import assigned_once, function_around, imported_name, spliced, whole
from ampscope.cures.rewriting.source_file import HasPlace, SourceFile, source_file
from ampscope.cures.rewriting.statement import Splice, dotted

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
    """Holds the place where a program makes an autocast region."""

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
    """Yields what decorators and ``with`` blocks around a line enter, outermost first, in the line's own function."""
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
    """Returns the code for a dtype where a region is made; None where the program cannot name it there."""
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


#: What the output of a model is called whose call is a part of the loss's line.
_OUTPUT = "output"


class _Place(NamedTuple):
    """A statement in an autocast region, and the call of the model in it."""

    source: SourceFile
    region: ast.With
    statement: ast.stmt
    after: list[ast.stmt]  #: what follows it in the region
    call: ast.Call

    @property
    def names(self) -> list[str]:
        """The names that the outputs get, where the statement does nothing else; empty where it does more."""
        node = self.statement
        if not isinstance(node, ast.Assign) or len(node.targets) != 1 or node.value is not self.call:
            return []
        target = node.targets[0]
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        names = [each.id for each in parts if isinstance(each, ast.Name)]
        return names if len(names) == len(parts) else []

    @property
    def moved(self) -> list[ast.stmt]:
        """The statements that are to stand after the region."""
        return self.after if self.names else [self.statement, *self.after]


def loss_in_float32(called_at: HasPlace, models: Sequence[str], tensors: int) -> str | None:
    """Moves the statements that follow a model's call out of its autocast region, and gives them the output in float32.

    Args:
        called_at: The line that calls the model under autocast, as it was recorded.
        models: What the program calls its models: one of them is called there.
        tensors: How many tensors the call returned, one or a tuple of them; 0 for anything else.

    Returns:
        A diff of the file; None where it is not at hand, where the region is not one around plain statements alone, and
        where the loss reads something else than these tensors from in there.
    """
    place = _place(called_at, models)
    if place is None or not place.moved or not _can_move(place) or tensors != (len(place.names) or 1):
        return None
    first, last = place.statement.lineno, place.region.end_lineno or 0
    return changed(place.source, called_at.file, [(first, last, list(_lines(place)))])


def _place(called_at: HasPlace, models: Sequence[str]) -> _Place | None:
    source = source_file(called_at)
    tree = source.tree() if source is not None else None
    if source is None or tree is None:
        return None
    line = called_at.line
    blocks = [node for node in ast.walk(function_around(tree, line)) if isinstance(node, ast.With)]
    blocks = [node for node in blocks if node.body[0].lineno <= line <= (node.end_lineno or 0)]
    if not blocks or len(blocks[-1].items) != 1:
        return None
    region = blocks[-1]
    here = [each for each in region.body if each.lineno <= line <= (each.end_lineno or 0)]
    called = [(each, node) for each in region.body for node in ast.walk(each) if isinstance(node, ast.Call)]
    called = [(each, node) for each, node in called if dotted(node.func) in models]
    regions = [each for each in entered(tree, line) if makes_region(tree, each, region.lineno)]
    is_region = regions == [region.items[0].context_expr]  # a second one around it would hold the loss still
    if len(called) != 1 or here != [called[0][0]] or not is_region:
        return None
    (statement, call), number = called[0], region.body.index(here[0])
    return _Place(source, region, statement, region.body[number + 1 :], call)


def _can_move(place: _Place) -> bool:
    """Whether the lines can stand after the region as they are."""
    firsts = [node.lineno for node in (place.region, *place.region.body)]
    is_plain = all(isinstance(each, (ast.Assign, ast.AugAssign, ast.Expr)) for each in place.moved)
    parts = [node for each in place.moved for node in ast.walk(each)]
    texts = [node for node in parts if isinstance(node, (ast.Constant, ast.JoinedStr))]
    is_of_lines = all(node.lineno == node.end_lineno for node in texts)  # a longer text's lines are part of it
    number = place.region.body.index(place.statement)
    before = {name for each in place.region.body[:number] for name in _stored(each)}
    read = {node.id for node in parts if isinstance(node, ast.Name)}
    is_free = bool(place.names) or (_OUTPUT not in read and place.call.lineno == place.call.end_lineno)
    return is_plain and is_of_lines and is_free and len(set(firsts)) == len(firsts) and before.isdisjoint(read)


def _stored(statement: ast.stmt) -> Iterator[str]:
    names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
    return (node.id for node in names if isinstance(node.ctx, ast.Store))


def _lines(place: _Place) -> Iterator[str]:
    """The lines from the model's call to the end of the region, as they are to be."""
    source, statement = place.source, place.statement
    first, last = statement.lineno, statement.end_lineno or 0
    inner, outer = source.indent(first), source.indent(place.region.lineno)
    own = [line.rstrip("\r\n") for line in source.lines[first - 1 : last]]
    rest = [line.rstrip("\r\n") for line in source.lines[last : place.region.end_lineno]]
    if len(place.names) == 1:
        end = (place.call.end_lineno or 0) - first
        column = place.call.end_col_offset or 0
        own[end] = f"{_cut(own[end], 0, column)}.float(){_cut(own[end], column)}"
        yield from own
    elif place.names:
        yield from own
        yield f"{outer}{', '.join(place.names)} = {', '.join(f'{each}.float()' for each in place.names)}"
    else:
        row = place.call.lineno - first
        start, end = place.call.col_offset, place.call.end_col_offset or 0
        yield f"{inner}{_OUTPUT} = {_cut(own[row], start, end)}"
        own[row] = f"{_cut(own[row], 0, start)}{_OUTPUT}.float(){_cut(own[row], end)}"
        rest = [*own, *rest]
    yield from (f"{outer}{line.removeprefix(inner)}" if line.startswith(inner) else line for line in rest)


def _cut(line: str, start: int, end: int | None = None) -> str:
    """A part of a line, counted in bytes as `ast` does."""
    return line.encode()[start:end].decode()


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
