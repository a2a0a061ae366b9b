"""The one call of a torch function in a statement, however it is spelled: function, method or operator."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ampscope.analysis.cures.rewriting.statement import Statement, dotted

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
#: What torch's own functions are called by, where a program does not say otherwise.
_TORCH = frozenset({"torch", "th", "F", "nn", "functional"})
#: Modules whose functions have the names of torch's.
_OTHERS = frozenset({"math", "cmath", "np", "numpy", "jnp", "jax", "tf", "scipy", "sp", "statistics", "random"})
#: Methods of a tensor that take no operand: what is given one is a function of a module.
_UNARY = frozenset(
    {"log", "log2", "log10", "log1p", "exp", "exp2", "expm1", "sqrt", "rsqrt", "sigmoid", "square", "reciprocal"}
    | {"abs", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "atanh", "erfinv", "logit"}
)
#: Keywords by which functions take their first and second tensor.
_FIRST, _SECOND = ("input", "self", "mat1"), ("other", "target", "mat2", "exponent", "mask")
#: What is a number of Python's, whatever it is called of.
_NUMBERS = frozenset({"len", "int", "float", "max", "min", "round", "item", "numel", "dim", "size", "stride"})


@dataclass(frozen=True, slots=True)
class Found:
    """A call of a torch function."""

    node: ast.expr | ast.AugAssign
    name: str
    operands: tuple[ast.expr, ...]  #: of a method, the tensor first
    keywords: dict[str, ast.keyword]
    namespace: str | None  #: ``torch.``, ``F.``, empty for a bare name; None for a method or an operator

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


def found_call(statement: Statement, name: str, within: ast.AST | None = None) -> Found | None:
    """The call of a function in a statement; None where there is none, or more than one that may be meant.

    Args:
        statement: The statement.
        name: The function as code spells it (``log``, ``div`` for a slash too).
        within: A part of the statement that holds the call.
    """
    found = found_calls(statement, name, within)
    return found[0] if len(found) == 1 else None


def found_calls(statement: Statement, name: str, within: ast.AST | None = None) -> list[Found]:
    """Every call of a function in a statement, as `found_call`; none where one may be something else."""
    exact = list(_calls(statement, frozenset({name}), within))
    found = exact or list(_calls(statement, _other_names(name), within))
    return [each for each in found if each is not None] if None not in found else []


def as_call(node: ast.AST | None, *names: str) -> Found | None:
    """A part of a statement as the call of one of these functions; None where it is none."""
    return _found(node, frozenset(names))


def _other_names(name: str) -> frozenset[str]:
    return frozenset(next((names for names in _NAMES if name in names), (name,)))


def _calls(statement: Statement, names: frozenset[str], within: ast.AST | None) -> Iterator[Found | None]:
    """The calls; None for one that has the name and may be something else."""
    for node in filter(statement.is_meant, statement.nodes()) if within is None else ast.walk(within):
        if _is_opaque(node, names):
            yield None
        elif (found := _found(node, names)) is not None:
            yield found


def _is_opaque(node: ast.AST, names: frozenset[str]) -> bool:
    """Whether a call is one of the program's own methods, or a module of that name, and not known to be torch's."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in names:
        return False
    return dotted(node.func.value) in ("self", "cls") or _is_super(node.func.value)


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and dotted(node.func) == "super"


def _found(node: ast.AST | None, names: frozenset[str]) -> Found | None:
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return _operation(node, names)
    if not isinstance(node, ast.Call) or any(isinstance(each, ast.Starred) for each in node.args):
        return None
    if isinstance(node.func, ast.Name) and node.func.id in names:
        return Found(node, node.func.id, tuple(node.args), _keywords(node), "")
    if isinstance(node.func, ast.Attribute) and node.func.attr in names and not _is_opaque(node, names):
        return _of_owner(node, node.func)
    return None


def _of_owner(node: ast.Call, function: ast.Attribute) -> Found | None:
    """A call with a dot: a function of a module, or a method of a tensor."""
    owner, name, args, keywords = function.value, function.attr, tuple(node.args), _keywords(node)
    path = dotted(owner)
    if _root(path) in _OTHERS:
        return None
    if _is_function(path, name, args, keywords):
        return Found(node, name, args, keywords, f"{path}.")
    return Found(node, name, (owner, *args), keywords, None)


def _keywords(node: ast.Call) -> dict[str, ast.keyword]:
    return {each.arg: each for each in node.keywords if each.arg is not None}


def _root(path: str) -> str:
    return path.split(".", maxsplit=1)[0]


def _operation(node: ast.BinOp | ast.AugAssign, names: frozenset[str]) -> Found | None:
    name = _OPERATORS.get(type(node.op), "")
    left, right = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
    if not name or names.isdisjoint(_other_names(name)) or (is_number(left) and is_number(right)):
        return None
    return Found(node, name, (left, right), {}, None)


def _is_function(path: str, name: str, args: Sequence[ast.expr], keywords: dict[str, ast.keyword]) -> bool:
    """Whether what stands before the dot is a module rather than a tensor."""
    if not path:
        return False
    if _root(path) in _TORCH:
        return True
    if name in _UNARY:
        return bool(args) or "input" in keywords
    if "input" in keywords:
        return True
    return name in ("softmax", "log_softmax") and bool(args) and not is_number(args[0])


def is_number(node: ast.expr) -> bool:
    """Whether a part is a number of Python's, as far as it shows: a constant, a length, what is made of them."""
    if isinstance(node, (ast.UnaryOp, ast.BinOp)):
        parts = (node.operand,) if isinstance(node, ast.UnaryOp) else (node.left, node.right)
        return all(map(is_number, parts))
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Call) and _gives_number(node.func))


def _gives_number(function: ast.expr) -> bool:
    path = dotted(function)
    name = function.attr if isinstance(function, ast.Attribute) else path
    of_python = name in _NUMBERS and (name not in ("max", "min") or isinstance(function, ast.Name))
    return path.startswith("math.") or of_python
