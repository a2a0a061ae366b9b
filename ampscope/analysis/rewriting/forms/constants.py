"""Numbers that a program spells are found, and written so that a dtype holds them."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from decimal import ROUND_CEILING, Decimal

from ampscope.analysis.rewriting.found_call import Asked, Found
from ampscope.analysis.rewriting.names import Kind, meaning_of, path_of
from ampscope.analysis.rewriting.statement import Splice, Statement, dotted, is_plain
from ampscope.trace.dtypes import FINFO, HALF_DTYPES

#: How infinity is spelled besides ``float("inf")``.
_INFINITIES = frozenset({"torch.inf", "math.inf", "numpy.inf"})
#: What is read as a number: a larger one is no constant that a dtype was meant to hold.
_LARGEST = 1e300


def number(value: float) -> str:
    """``1e-4``, ``0.5``, ``65504.0``."""
    if math.isinf(value):
        return 'float("inf")' if value > 0 else 'float("-inf")'
    if value and (abs(value) < 1e-2 or abs(value) >= 1e6):
        return f"{Decimal(repr(value)).normalize():e}".replace("e+", "e")
    return repr(value)


def typed(value: float) -> str:
    """A small number as a person would type it: two digits, rounded up, so that it bounds what it bounded."""
    if not 0 < value < 1e-2:
        return number(value)
    exact = Decimal(repr(value))
    return number(float(exact.quantize(Decimal((0, (1,), exact.adjusted() - 1)), rounding=ROUND_CEILING)))


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


#: The small number that a function takes where the call gives none.
_DEFAULTS = {
    "normalize": ("eps", 1e-12),
    "layer_norm": ("eps", 1e-5),
    "group_norm": ("eps", 1e-5),
    "batch_norm": ("eps", 1e-5),
    "instance_norm": ("eps", 1e-5),
    "cosine_similarity": ("eps", 1e-8),
    "pairwise_distance": ("eps", 1e-6),
    "gaussian_nll_loss": ("eps", 1e-6),
    "poisson_nll_loss": ("eps", 1e-8),
    "triplet_margin_loss": ("eps", 1e-6),
}
#: Functions of `torch.nn.functional` that take their number by place, too: at which.
_PLACES = {"normalize": 3, "cosine_similarity": 3, "pairwise_distance": 3, "layer_norm": 4}


def constant(statement: Statement, asked: Asked) -> Sequence[Splice]:
    """``clamp(min=1e-8)`` becomes ``clamp(min=1e-4)``; ``-1e9`` the end of the dtype's range."""
    if asked.value is None:
        return ()
    found = asked.found(statement)
    places = _places(statement, found, asked)
    if len(places) == 1:
        mirrored = _mirrored(statement, found, asked)
        return [statement.instead(places[0], _written(statement, found, asked.value)), *mirrored]
    if found is None or places:
        return ()
    return _default(statement, found, asked) or _named(statement, found, asked.value, asked.was)


def _mirrored(statement: Statement, found: Found | None, asked: Asked) -> Sequence[Splice]:
    """The other end of a stretch about zero, where one end becomes 1: it becomes -1 in the same dtype."""
    value, was = asked.value or 0.0, asked.was or 0.0
    if not 0.9 < abs(value) < 1 or not 0.9 < abs(was) < 1:
        return ()
    places = _places(statement, found, asked._replace(was=-was))
    return [statement.instead(places[0], _written(statement, found, -value))] if len(places) == 1 else ()


def _named(statement: Statement, found: Found, value: float, was: float | None) -> Sequence[Splice]:
    """A small number that has a name, kept from being smaller."""
    given = [*found.operands, *(each.value for each in found.keywords.values())]
    names = [each for each in given if is_eps(each)]
    if len(names) != 1 or was is None or not 0 < was < value:
        return ()
    return [statement.instead(names[0], f"max({statement.text(names[0])}, {number(value)})")]


def is_eps(node: ast.expr) -> bool:
    """Whether a part is the name of a small number of Python's: of a tensor, too, `max` would make something else."""
    name, kind = dotted(node).rpartition(".")[2].lower(), meaning_of(node).kind
    if kind in (Kind.VALUE, Kind.MIXED) or (name == "delta" and kind is not Kind.NUMBER):
        return False
    of_eps = name.endswith(("_eps", "_epsilon")) or name.startswith("eps_")
    return of_eps or name in ("eps", "epsilon", "tiny", "delta")


def _places(statement: Statement, found: Found | None, asked: Asked) -> list[ast.expr]:
    """Finds where the number stands in the call, or else in the whole statement; callers use one that is alone."""
    if asked.was is None:
        return []
    if found is not None:
        given = [*found.operands, *(each.value for each in found.keywords.values())]
        inside = [place for each in given for place in _numbers(each, asked.was)]
        if inside:
            return inside
    return [place for node in statement.tree.body for place in _numbers(node, asked.was)]


def _numbers(node: ast.AST, was: float) -> list[ast.expr]:
    """The parts that spell a number, the outermost of each."""
    value = value_of(node) if isinstance(node, ast.expr) else None
    if value is not None and math.isclose(value, was, rel_tol=1e-12) and isinstance(node, ast.expr):
        return [node]
    if isinstance(node, ast.UnaryOp) and value is not None:
        return []  # the number without its sign is another one
    return [place for child in ast.iter_child_nodes(node) for place in _numbers(child, was)]


def _written(statement: Statement, found: Found | None, value: float) -> str:
    """The number as it is written: the end of a dtype's range by the dtype of the tensor, where that has a name."""
    dtype, end = end_of_half(value)
    if not end:
        return number(below_one(value))
    tensor = found.operands[0] if found is not None and found.operands and not found.is_operator else None
    if tensor is None or not (dotted(tensor) and is_plain(tensor)):
        return f"{statement.spelled('torch.finfo')}({statement.spelled(dtype)}).{end}"
    return f"{statement.spelled('torch.finfo')}({statement.text(tensor)}.dtype).{end}"


def _default(statement: Statement, found: Found, asked: Asked) -> Sequence[Splice]:
    """The keyword by which a function takes the number, where the call leaves it out."""
    keyword, default = _DEFAULTS.get(found.name, ("", math.nan))
    is_default = asked.was is None or math.isclose(asked.was, default, rel_tol=1e-6)
    given = keyword in found.keywords or len(found.operands) > _PLACES.get(found.name, len(found.operands))
    if not keyword or not is_default or given:
        return ()
    return [added_keyword(statement, found.node, f"{keyword}={number(asked.value or default)}")]


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
