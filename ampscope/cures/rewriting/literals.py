"""Numbers that a program spells are found, and written so that a dtype holds them."""

from __future__ import annotations

import ast
import math
from decimal import ROUND_CEILING, Decimal

from ampscope.cures.rewriting.names import Kind, meaning_of, path_of
from ampscope.cures.rewriting.statement import Splice, Statement, dotted
from ampscope.trace.dtypes import FINFO, HALF_DTYPES

#: How infinity is spelled besides ``float("inf")``.
_INFINITIES = frozenset({"torch.inf", "math.inf", "numpy.inf"})
#: What is read as a number: a larger one is no constant that a dtype was meant to hold.
_LARGEST = 1e300


def literal(value: float) -> str:
    """``1e-4``, ``0.5``, ``65504.0``."""
    if math.isinf(value):
        return 'float("inf")' if value > 0 else 'float("-inf")'
    if value and (abs(value) < 1e-2 or abs(value) >= 1e6):
        return f"{Decimal(repr(value)).normalize():e}".replace("e+", "e")
    return repr(value)


def typed(value: float) -> str:
    """A small number as a person would type it: two digits, rounded up, so that it bounds what it bounded."""
    if not 0 < value < 1e-2:
        return literal(value)
    exact = Decimal(repr(value))
    return literal(float(exact.quantize(Decimal((0, (1,), exact.adjusted() - 1)), rounding=ROUND_CEILING)))


def below_one(value: float) -> float:
    """A bound next to 1, or to -1, with no more digits than it takes, not nearer: ``0.999`` for 1 - 2**-10."""
    if not 0.9 < abs(value) < 1:
        return value
    digits = 10.0 ** math.ceil(-math.log10(1 - abs(value)))
    return math.copysign(math.floor(abs(value) * digits) / digits, value)


def end_of_half(value: float) -> tuple[str, str]:
    """``torch.float16`` and ``min`` where a number is the end of a half dtype's range; empty where it is not."""
    for dtype in sorted(HALF_DTYPES):
        if abs(value) == FINFO[dtype].max:
            return f"torch.{dtype}", "min" if value < 0 else "max"
    return "", ""


def value_of(node: ast.AST) -> float | None:
    """The number that a part spells; None where it is none."""
    if isinstance(node, ast.Constant):
        return _number(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        inner = value_of(node.operand)
        return None if inner is None else -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        left, right = value_of(node.left), value_of(node.right)
        sign = 1.0 if isinstance(node.op, ast.Add) else -1.0
        return None if left is None or right is None else left + sign * right
    if path_of(node) in _INFINITIES or _is_open_inf(node):
        return math.inf
    if isinstance(node, ast.Call) and dotted(node.func) == "float" and len(node.args) == 1:
        text = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
        return {"inf": math.inf, "-inf": -math.inf}.get(text) if isinstance(text, str) else None
    return None


def _is_open_inf(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "inf" and meaning_of(node).kind is Kind.OPEN


def _number(held: object) -> float | None:
    if isinstance(held, bool) or not isinstance(held, (int, float)):
        return None
    return float(held) if abs(held) < _LARGEST else None


def is_eps(node: ast.expr) -> bool:
    """Whether a part is the name of a small number of Python's: of a tensor, too, `max` would make something else."""
    name, kind = dotted(node).rpartition(".")[2].lower(), meaning_of(node).kind
    if kind in (Kind.VALUE, Kind.MIXED) or (name == "delta" and kind is not Kind.NUMBER):
        return False
    of_eps = name.endswith(("_eps", "_epsilon")) or name.startswith("eps_")
    return of_eps or name in ("eps", "epsilon", "tiny", "delta")


def added_keyword(statement: Statement, call: ast.AST, text: str) -> Splice:
    """One more argument at the end of a call."""
    assert isinstance(call, ast.Call)
    ends = [*map(statement.span, call.args), *map(statement.span, call.keywords)]
    last = max((end for _, end in ends), default=None)
    end = statement.span(call)[1] - 1
    if last is None:
        return Splice(end, end, text)
    trailing = statement.code.encode()[last:end]
    extra = trailing.count(b")")  # parentheses around the last argument
    at = last + trailing.rfind(b")") + 1 if extra else last
    return Splice(at, at, f", {text}")
