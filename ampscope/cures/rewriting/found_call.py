"""The one call of a torch function in a statement is found, however it is spelled: function, method or operator."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from ampscope.cures.rewriting.names import Kind, is_number, meaning_of, path_of, root_of
from ampscope.cures.rewriting.statement import Splice, Statement, dotted, is_literal

#: Names that one function goes by; operators are known by the first.
_NAMES = (
    ("matmul", "mm", "bmm", "dot", "mv", "__matmul__", "__rmatmul__", "__imatmul__"),
    (
        "div",
        "true_divide",
        "divide",
        "reciprocal",
        "__truediv__",
        "__rtruediv__",
        "__itruediv__",
        "__div__",
        "__rdiv__",
    ),
    ("mul", "multiply", "__mul__", "__rmul__", "__imul__"),
    ("add", "__add__", "__radd__", "__iadd__"),
    ("sub", "subtract", "rsub", "__sub__", "__rsub__", "__isub__"),
    ("pow", "float_power", "__pow__", "__rpow__", "__ipow__"),
    ("norm", "vector_norm", "matrix_norm"),
    ("clamp", "clip", "clamp_min", "clamp_max"),
    ("masked_fill", "where"),
)
_OPERATORS: dict[type[ast.operator], str] = {
    ast.MatMult: "matmul",
    ast.Div: "div",
    ast.Mult: "mul",
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Pow: "pow",
}
#: Modules whose functions have the names of torch's.
_OTHERS = frozenset({"math", "cmath", "numpy", "jax", "tensorflow", "scipy", "statistics", "random"})
#: How many operands a method takes by place besides its tensor: what is given more is a function of a module.
_TAKEN = {
    **dict.fromkeys(("log", "log2", "log10", "log1p", "exp", "exp2", "expm1", "sqrt", "rsqrt", "sigmoid", "square"), 0),
    **dict.fromkeys(("abs", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "atanh", "erfinv"), 0),
    **dict.fromkeys(("arcsin", "arccos", "arctanh", "reciprocal"), 0),
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot", "inner", "div", "true_divide", "divide", "mul"), 1),
    **dict.fromkeys(("multiply", "add", "sub", "subtract", "pow", "float_power", "clamp_min", "clamp_max"), 1),
    **dict.fromkeys(("where", "masked_fill", "addmm", "baddbmm", "addmv"), 2),
}
#: Keywords by which functions take their first and second tensor.
_FIRST, _SECOND = ("input", "self", "mat1"), ("other", "target", "mat2", "exponent", "mask")


@dataclass(frozen=True, slots=True)
class TorchCall:
    """A call of a torch function."""

    node: ast.expr | ast.AugAssign
    name: str
    operands: tuple[ast.expr, ...]  #: of a method, the tensor first
    keywords: dict[str, ast.keyword]
    namespace: str | None  #: ``torch.``, ``F.``, empty for a bare name; None for a method or an operator
    is_open: bool = False  #: a bare name of which nothing is known but that it is torch's, if it stands alone

    @property
    def is_operator(self) -> bool:
        """Whether it is spelled with a sign."""
        return isinstance(self.node, (ast.BinOp, ast.AugAssign))

    @property
    def is_method(self) -> bool:
        """Whether it is called of its first operand."""
        return self.namespace is None and not self.is_operator

    def operand(self, number: int) -> ast.expr | None:
        """One of its operands, given by place or by name; None where it has fewer."""
        if number < len(self.operands):
            return self.operands[number]
        names = (_FIRST, _SECOND)[number] if number < 2 else ()
        given = [self.keywords[name].value for name in names if name in self.keywords]
        return given[0] if len(given) == 1 else None

    def argument(self, number: int, name: str) -> ast.expr | None:
        """Returns what it is given by place or by name; None where neither is."""
        return self.keywords[name].value if name in self.keywords else self.operand(number)

    def with_operand(self, statement: Statement, place: ast.expr, text: str) -> Splice:
        """Puts ``text`` in the place of an operand; what a sign or a dot follows lies in no parentheses of its own."""
        inner = self.is_operator or (self.is_method and place is self.operands[0])
        return statement.instead_of_all(place, text) if inner else statement.instead(place, text)


def found_call(statement: Statement, name: str, within: ast.AST | None = None) -> TorchCall | None:
    """The call of a function in a statement; None where there is none, or more than one that may be meant.

    Args:
        statement: The statement.
        name: The function as code spells it (``log``, ``div`` for a slash too).
        within: A part of the statement that holds the call.
    """
    found = found_calls(statement, name, within)
    return found[0] if len(found) == 1 else None


def found_calls(statement: Statement, name: str, within: ast.AST | None = None) -> list[TorchCall]:
    """Every call of a function in a statement, as `found_call`; none where one may be something else."""
    exact = list(_calls(statement, frozenset({name}), within))
    found = exact or list(_calls(statement, _other_names(name), within))
    known = [each for each in found if each is not None]
    unclear = len(known) < len(found) or (len(known) > 1 and any(each.is_open for each in known))
    return known if not unclear else []


def as_call(node: ast.AST | None, *names: str) -> TorchCall | None:
    """A part of a statement as the call of one of these functions; None where it is none, or may be none."""
    found = _found(node, frozenset(names))
    return found if isinstance(found, TorchCall) and not found.is_open else None


def first_of(found: TorchCall | None) -> ast.expr | None:
    """The first operand of a call; None where there is no call, or none."""
    return found.operand(0) if found is not None else None


def _other_names(name: str) -> frozenset[str]:
    return frozenset(next((names for names in _NAMES if name in names), (name,)))


def _calls(statement: Statement, names: frozenset[str], within: ast.AST | None) -> Iterator[TorchCall | None]:
    """The calls; None for one that has the name and may be something else."""
    for node in filter(statement.is_meant, statement.nodes()) if within is None else ast.walk(within):
        found = _found(node, names)
        if found is not None:
            yield found if isinstance(found, TorchCall) else None


def _found(node: ast.AST | None, names: frozenset[str]) -> TorchCall | _Reading | None:
    """The call of one of these functions; that it is unclear whether it is one; None where it is none."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return _operation(node, names)
    name = _name_of(node.func) if isinstance(node, ast.Call) else ""
    if not isinstance(node, ast.Call) or name not in names:
        return None
    reading, has_star = _reading(node), any(isinstance(each, ast.Starred) for each in node.args)
    if reading is _Reading.UNCLEAR:
        return reading
    return _as_found(node, name, reading) if reading is not _Reading.OTHER and not has_star else None


def _name_of(function: ast.expr) -> str:
    """A function's own name, whatever the program calls it; empty for what has none."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return path_of(function).rpartition(".")[2] or function.id if isinstance(function, ast.Name) else ""


def _as_found(node: ast.Call, name: str, reading: _Reading) -> TorchCall:
    args, keywords = tuple(node.args), _keywords(node)
    if not isinstance(node.func, ast.Attribute):
        return TorchCall(node, name, args, keywords, "", reading is _Reading.OPEN)
    if reading is _Reading.FUNCTION:
        return TorchCall(node, name, args, keywords, f"{dotted(node.func.value)}.")
    return TorchCall(node, name, (node.func.value, *args), keywords, None)


class _Reading(Enum):
    """Classifies a call that has a function's name."""

    FUNCTION = auto()  #: torch's, with all operands in its parentheses
    METHOD = auto()  #: a tensor's
    OPEN = auto()  #: torch's, if nothing else in the statement can be
    OTHER = auto()
    UNCLEAR = auto()


def _of_path(path: str) -> _Reading:
    root = path.partition(".")[0]
    return _Reading.FUNCTION if root == "torch" else _Reading.OTHER if root in _OTHERS else _Reading.UNCLEAR


def _reading(node: ast.Call) -> _Reading:
    if isinstance(node.func, ast.Attribute):
        return _of_owner(node, node.func)
    meaning = meaning_of(node.func)
    if meaning.kind is Kind.OPEN:
        return _Reading.OPEN
    return _of_path(meaning.path) if meaning.kind is Kind.IMPORTED else _Reading.UNCLEAR


def _of_owner(node: ast.Call, function: ast.Attribute) -> _Reading:
    """A call with a dot: a function of a module, or a method of a tensor."""
    owner, root = function.value, root_of(function.value)
    if dotted(owner) in ("self", "cls") or (isinstance(owner, ast.Call) and dotted(owner.func) == "super"):
        return _Reading.UNCLEAR
    if root is None or (isinstance(owner, ast.Attribute) and root.id == "self"):
        return _Reading.METHOD
    path, kind, given = path_of(owner), meaning_of(root).kind, len(node.args)
    if path or kind is Kind.NUMBER:
        return _of_path(path) if path else _Reading.OTHER
    takes_it = given <= _TAKEN.get(function.attr, given) and all(each.arg != "input" for each in node.keywords)
    is_method = kind is Kind.VALUE or function.attr in _TAKEN or not given or _tells_method(node.args[0])
    return _Reading.METHOD if takes_it and is_method and kind is not Kind.MIXED else _Reading.UNCLEAR


def _tells_method(first: ast.expr) -> bool:
    """Whether what is given first is no tensor: a number, a text, a name of dimensions."""
    return is_literal(first) or is_number(first) or dotted(first).rpartition(".")[2] in ("dim", "dims", "axis")


def _keywords(node: ast.Call) -> dict[str, ast.keyword]:
    return {each.arg: each for each in node.keywords if each.arg is not None}


def _operation(node: ast.BinOp | ast.AugAssign, names: frozenset[str]) -> TorchCall | None:
    name = _OPERATORS.get(type(node.op), "")
    left, right = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
    if not name or names.isdisjoint(_other_names(name)) or (is_number(left) and is_number(right)):
        return None
    return TorchCall(node, name, (left, right), {}, None)


class Asked(NamedTuple):
    """A change of one call."""

    call: str  #: the function, as code spells it
    argument: int | None = None  #: which operand the change is about
    value: float | None = None  #: the number that goes in
    was: float | None = None  #: the number that stands there

    @property
    def name(self) -> str:
        """The function's own name, without its module."""
        return self.call.rpartition(".")[2]

    def found(self, statement: Statement) -> TorchCall | None:
        """The call in a statement; None where it is not clear which."""
        return found_call(statement, self.name)

    def all_found(self, statement: Statement) -> list[TorchCall]:
        """Every call of the function in a statement: a replay has changed all of one line."""
        return found_calls(statement, self.name)
