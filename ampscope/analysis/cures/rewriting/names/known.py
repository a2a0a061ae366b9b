"""The names of a statement with what they stand for."""

from __future__ import annotations

import ast

from ampscope.analysis.cures.rewriting.names.bindings import Comprehension, ScopeNode, bound_in
from ampscope.analysis.cures.rewriting.names.scopes import NUMBER_FUNCTIONS, NUMBER_METHODS, Kind, Meaning, Scope

#: What modules are usually called, where the program's own imports are not at hand.
_USUAL = {
    **dict.fromkeys(("torch", "th"), "torch"),
    "nn": "torch.nn",
    "F": "torch.nn.functional",
    "functional": "torch.nn.functional",
    "np": "numpy",
    "sp": "scipy",
    "jnp": "jax.numpy",
    "tf": "tensorflow",
    **{name: name for name in ("math", "cmath", "numpy", "scipy", "jax", "statistics", "random")},
}


class KnownName(ast.Name):
    """A name of which it is known what it stands for."""

    meaning: Meaning


def of_statement(tree: ast.Module) -> Scope:
    """The scope of a statement of whose program nothing else is at hand."""
    return Scope(bound_in(tree))


def resolve(tree: ast.Module, scope: Scope) -> None:
    """Puts what the names of a statement stand for into its parse.

    Args:
        tree: The parse, which nobody else has.
        scope: Where the statement stands.
    """
    front: list[tuple[ast.AST, Scope]] = [(tree, scope)]
    while front:
        node, around = front.pop()
        inner = around.inside(node) if isinstance(node, ScopeNode) and node is not tree else around
        first = node.generators[0] if isinstance(node, Comprehension) else None
        for name, held in ast.iter_fields(node):
            parts = held if isinstance(held, list) else [held]
            known = [_known(each, inner) if isinstance(each, ast.Name) else each for each in parts]
            setattr(node, name, known if isinstance(held, list) else known[0])
            front.extend((each, inner) for each in known if isinstance(each, ast.AST))
        if first is not None and isinstance(first.iter, ast.Name):  # read before the comprehension has its own names
            first.iter = _known(first.iter, around)


def _known(node: ast.Name, scope: Scope) -> KnownName:
    found = ast.copy_location(KnownName(id=node.id, ctx=node.ctx), node)
    found.meaning = scope.meaning(node.id)
    return found


def meaning_of(node: ast.AST) -> Meaning:
    """What a name stands for; of anything else, and of a name of which nothing is known, that it is open."""
    return node.meaning if isinstance(node, KnownName) else Meaning()


def root_of(node: ast.AST) -> ast.Name | None:
    """The first of a chain of names; None for what is none."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node if isinstance(node, ast.Name) else None


def path_of(node: ast.AST) -> str:
    """What a chain of names is called outside the program: ``torch.nn.functional``; empty for what is its own."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    meaning = meaning_of(node)
    usual = _USUAL.get(node.id, "") if isinstance(node, ast.Name) and meaning.kind is Kind.OPEN else ""
    root = meaning.path or usual
    return ".".join([root, *reversed(parts)]) if root else ""


def is_number(node: ast.expr) -> bool:
    """Whether a part is a number of Python's, as far as it shows: a constant, a length, what is made of them."""
    if isinstance(node, (ast.UnaryOp, ast.BinOp)):
        parts = (node.operand,) if isinstance(node, ast.UnaryOp) else (node.left, node.right)
        return all(map(is_number, parts))
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    if isinstance(node, ast.Call):
        return _gives_number(node.func)
    return isinstance(node, ast.Constant) or meaning_of(node).kind is Kind.NUMBER


def _gives_number(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in (*NUMBER_FUNCTIONS, "max", "min") and meaning_of(function).kind is Kind.OPEN
    is_method = isinstance(function, ast.Attribute) and function.attr in NUMBER_METHODS
    return path_of(function).startswith("math.") or is_method
