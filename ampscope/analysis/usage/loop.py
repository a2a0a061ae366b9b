"""A training loop as its file has it: the statement that a mistake was seen at, and the scaler's calls around it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ampscope.cures.rewriting.source_file import HasPlace, SourceFile, source_file
from ampscope.cures.rewriting.statement import dotted

#: First and last line, and what comes in their place; a last line before the first inserts there.
LinesChanged = tuple[int, int, Sequence[str]]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


class Spot(NamedTuple):
    """A statement in the block that holds it."""

    node: ast.stmt
    block: list[ast.stmt]
    owners: tuple[ast.AST, ...]  #: what it stands in, from the outside

    @property
    def first(self) -> int:
        """The number of its first line."""
        return self.node.lineno

    @property
    def last(self) -> int:
        """The number of its last line."""
        return self.node.end_lineno or self.node.lineno

    @property
    def number(self) -> int:
        """Its place in the block."""
        return self.block.index(self.node)

    @property
    def function(self) -> ast.AST:
        """The function that it stands in, or the whole program."""
        inside = [owner for owner in self.owners if isinstance(owner, _FUNCTIONS)]
        return inside[-1] if inside else self.owners[0]

    @property
    def call(self) -> ast.Call | None:
        """The call that the statement is, its result kept or not."""
        value = self.node.value if isinstance(self.node, (ast.Expr, ast.Assign)) else None
        return value if isinstance(value, ast.Call) else None

    def calls(self, method: str, arguments: int) -> str:
        """Returns the object of which the statement calls this method with so many arguments; empty for another one."""
        call = self.call
        named = call is not None and isinstance(call.func, ast.Attribute) and call.func.attr == method
        if call is None or not named or len(call.args) != arguments or not isinstance(call.func, ast.Attribute):
            return ""
        return dotted(call.func.value)


@dataclass(frozen=True)
class Loop:
    """The code around a recorded line."""

    source: SourceFile
    spot: Spot
    spots: tuple[Spot, ...]  #: the statements of the same function

    @cached_property
    def scaler(self) -> str:
        """The name of the one scaler of the function, or of the statement; empty where there is none, or several."""
        names = {
            dotted(call.func.value)
            for call in ast.walk(self.spot.function)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "scale"
            if len(call.args) == 1
        }
        names = names or {self.spot.calls("step", 1), self.spot.calls("unscale_", 1)} - {""}
        return next(iter(names)) if len(names) == 1 else ""

    def of_scaler(self, method: str, arguments: int) -> list[Spot]:
        """The statements of the function that call a method of the scaler."""
        return [spot for spot in self.spots if self.scaler and spot.calls(method, arguments) == self.scaler]

    @cached_property
    def step(self) -> Spot | None:
        """The one statement by which the scaler steps an optimizer."""
        steps = self.of_scaler("step", 1)
        return steps[0] if len(steps) == 1 else None

    @property
    def optimizer(self) -> str:
        """The name of what it steps; empty where that is no name."""
        call = self.step.call if self.step is not None else None
        return dotted(call.args[0]) if call is not None else ""

    def lines(self, spot: Spot) -> list[str]:
        """A statement's lines, without their ends."""
        return [line.rstrip("\r\n") for line in self.source.lines[spot.first - 1 : spot.last]]

    def indent(self, spot: Spot) -> str:
        """Returns the white space that a statement's first line begins with."""
        return self.source.indent(spot.first)

    def stands_alone(self, *spots: Spot) -> bool:
        """Whether statements share their lines with no other, nor with the head of their block."""
        taken = [number for spot in self.spots for number in {spot.first, _own_end(spot)}]
        return all(taken.count(spot.first) == 1 and taken.count(_own_end(spot)) == 1 for spot in spots)

    def inserted_before(self, spot: Spot, *code: str) -> LinesChanged:
        """Lines before a statement."""
        return spot.first, spot.first - 1, [self.indent(spot) + line for line in code]

    def inserted_after(self, spot: Spot, *code: str) -> LinesChanged:
        """Lines after a statement."""
        return spot.last + 1, spot.last, [self.indent(spot) + line for line in code]

    def removed(self, spot: Spot) -> LinesChanged:
        """A statement taken out."""
        return spot.first, spot.last, []

    @property
    def tree(self) -> ast.Module:
        """The whole program."""
        (tree,) = (owner for owner in self.spot.owners[:1] if isinstance(owner, ast.Module))
        return tree

    def names(self) -> set[str]:
        """Every name that the program uses."""
        return {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}


def _own_end(spot: Spot) -> int:
    return spot.node.lineno if getattr(spot.node, "body", None) else spot.last


def loop_at(place: HasPlace) -> Loop | None:
    """The loop around a recorded line; None where its file is not at hand, or reads otherwise there."""
    source = source_file(place)
    tree = source.tree() if source is not None else None
    if source is None or tree is None:
        return None
    spots = list(_spots(tree, (tree,)))
    meant = [spot for spot in spots if spot.first <= place.line <= spot.last and not getattr(spot.node, "body", None)]
    meant = meant or [spot for spot in spots if spot.first == place.line]  # the head of a block
    if len(meant) != 1:
        return None
    return Loop(source, meant[0], tuple(spot for spot in spots if spot.function is meant[0].function))


def _spots(node: ast.AST, owners: tuple[ast.AST, ...]) -> Iterator[Spot]:
    """Every statement below a node, in the order of the program."""
    for _, held in ast.iter_fields(node):
        block = held if isinstance(held, list) else []
        for each in block:
            if isinstance(each, ast.stmt):
                yield Spot(each, block, owners)
            if isinstance(each, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                yield from _spots(each, (*owners, each))
