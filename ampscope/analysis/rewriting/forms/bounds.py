"""Operands are kept within bounds, and means that may be over nothing divide by at least one."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence

from ampscope.analysis.rewriting.forms.constants import added_keyword, is_eps, number, typed, value_of
from ampscope.analysis.rewriting.found_call import Asked, Found, as_call
from ampscope.analysis.rewriting.names import is_number
from ampscope.analysis.rewriting.statement import Splice, Statement, dotted, is_plain, is_repeatable

MEAN = "mean"
#: Losses that are a mean over all elements, and those over the targets that are not to be ignored.
LOSSES = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"})
BY_TARGET = frozenset({"cross_entropy", "nll_loss"})
#: The place of the weights, which make it another mean, and the target that is left out unless another is named.
_WEIGHT, _IGNORED = 2, -100


def of_none(statement: Statement, asked: Asked) -> Sequence[Splice]:
    """``x.mean()`` becomes ``x.float().sum() / max(1, x.numel())``: zero where there is nothing, else the same."""
    return [splice for each in asked.all_found(statement) for splice in _counted(statement, each)]


def _counted(statement: Statement, found: Found) -> Sequence[Splice]:
    place, node = found.operand(0), found.node
    if place is None or not isinstance(node, ast.Call):
        return ()
    if found.name == MEAN:
        return _mean(statement, found, place, node)
    if found.is_method or found.keywords.keys() & {"reduction", "weight", "label_smoothing", "size_average", "reduce"}:
        return ()
    target = found.operand(1)
    if len(found.operands) > _WEIGHT or target is None or not is_repeatable(target):
        return ()
    count = f"{statement.atom(target)}.numel()"
    if found.name in BY_TARGET:
        ignored = found.keywords.get("ignore_index")
        if ignored is not None and value_of(ignored.value) is None:
            return ()
        left_out = statement.text(ignored.value) if ignored is not None else str(_IGNORED)
        count = f"({statement.atom(target)} != {left_out}).sum()"
    start, end = statement.span(node)
    before, after = ("", "") if _stands_free(statement, node) else ("(", ")")
    return [
        Splice(start, start, before),
        added_keyword(statement, node, 'reduction="sum"'),
        Splice(end, end, f" / max(1, {count}){after}"),
    ]


def _mean(statement: Statement, found: Found, place: ast.expr, node: ast.Call) -> Sequence[Splice]:
    if len(found.operands) > 1 or found.keywords.keys() - {"input"} or not is_repeatable(place):
        return ()  # along a dimension, what has nothing is a part of the result
    tensor = statement.atom(place)
    quotient = f"{tensor}.float().sum() / max(1, {tensor}.numel())"
    return [statement.instead(node, quotient if _stands_free(statement, node) else f"({quotient})")]


def _stands_free(statement: Statement, node: ast.expr) -> bool:
    """Whether a quotient in the place of a part is read as one: a value, what a call is given, what has parentheses."""
    if statement.enclosed(node) is not None:
        return True
    parents = [each for each in statement.nodes() if node in ast.iter_child_nodes(each)]
    return all(isinstance(each, (ast.Assign, ast.AnnAssign, ast.Return, ast.Call, ast.keyword)) for each in parents)


#: Functions whose result is too large, rather than undefined, at the end of their domain.
_GROWING = frozenset({"exp", "exp2", "expm1", "square", "cosh", "sinh"})
#: Functions that are undefined, or infinite, at and below zero.
_FALLING = frozenset(
    {"log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "div", "true_divide", "divide", "pow", "logit"}
)
#: Functions that are defined on a stretch about zero.
_BOTH_SIDES = frozenset({"special_erfinv", "asin", "acos", "atanh", "erfinv", "arcsin", "arccos", "arctanh"})
_DEVIATIONS = frozenset({"std", "var", "std_mean", "var_mean"})
_CLAMPS = ("clamp", "clip", "clamp_min", "clamp_max")


def operand_bound(statement: Statement, asked: Asked) -> Sequence[Splice]:
    """``log(x)`` becomes ``log(x.clamp(min=1e-7))``."""
    found = asked.all_found(statement)
    if asked.call in _DEVIATIONS:
        return [splice for each in found for splice in _of_one(statement, each)]
    if asked.call in {MEAN, *LOSSES, *BY_TARGET} and asked.argument is None:
        return of_none(statement, asked)
    if len(found) > 1 and any(each.is_operator or each.operand(1) is not None for each in found):
        return ()  # which of the operands are tensors is not seen
    return [splice for each in found for splice in _bounded(statement, each, asked)]


def _bounded(statement: Statement, found: Found, asked: Asked) -> Sequence[Splice]:
    place = _operand(found, asked)
    if place is None or asked.value is None or is_number(place):
        return ()
    if found.name not in _FALLING | _GROWING | _BOTH_SIDES:
        return ()  # of a mean, it is how many there are that is bounded
    kinds = _kinds(found.name, asked.value)
    clamp = as_call(place, *_CLAMPS)
    if clamp is not None:
        if len(kinds) == 1:
            return _other_bound(statement, clamp, kinds[0], asked.value)
        return _other_bounds(statement, clamp, abs(asked.value))
    sign = {"min": -1.0 if len(kinds) == 2 else 1.0, "max": 1.0}
    value = abs(asked.value) if len(kinds) == 2 else asked.value
    bounds = ", ".join(f"{kind}={typed(sign[kind] * value)}" for kind in kinds)
    return [_put(statement, found, place, lambda text: f"{text}.clamp({bounds})", atom=True)]


def _of_one(statement: Statement, found: Found) -> Sequence[Splice]:
    """``x.std(0)`` becomes ``x.std(0, correction=min(1, x.shape[0] - 1))``: the same of more values than one."""
    place, keyword = found.operand(0), found.keywords.get("dim")
    dim = keyword.value if keyword is not None else found.operand(1)
    along = value_of(dim) if dim is not None else None
    if place is None or not is_plain(place) or len(found.operands) > 2 or (dim is not None and along is None):
        return ()
    if found.keywords.keys() - {"dim", "keepdim", "input"} or not isinstance(found.node, ast.Call):
        return ()
    count = f"{statement.atom(place)}.numel()" if along is None else f"{statement.atom(place)}.shape[{along:.0f}]"
    return [added_keyword(statement, found.node, f"correction=min(1, {count} - 1)")]


def added_eps(statement: Statement, asked: Asked) -> Sequence[Splice]:
    """``a / b`` becomes ``a / (b + 1e-6)``; a smaller number that stands there is raised."""
    return [splice for each in asked.all_found(statement) for splice in _with_eps(statement, each, asked)]


def _with_eps(statement: Statement, found: Found, asked: Asked) -> Sequence[Splice]:
    place, value = _operand(found, asked), asked.value
    if place is None or value is None or is_number(place):
        return ()
    added = _added(place)
    if added is not None:
        return _raised(statement, added, value)
    return [_put(statement, found, place, lambda text: f"{text} + {typed(value)}", atom=False)]


def _operand(found: Found, asked: Asked) -> ast.expr | None:
    """The operand that is meant, where it can be replaced."""
    if found.name.endswith("_") and found.is_method:
        return None
    divides = found.name in ("div", "true_divide", "divide")
    argument = asked.argument if asked.argument is not None else int(divides)
    if isinstance(found.node, ast.AugAssign) and argument == 0:
        return None
    return found.operand(argument)


def _kinds(name: str, value: float) -> tuple[str, ...]:
    if name in _BOTH_SIDES:
        return ("min", "max")
    return ("max",) if name in _GROWING or (name == "pow" and value > 1) else ("min",)


def _other_bound(statement: Statement, clamp: Found, kind: str, value: float) -> Sequence[Splice]:
    """A bound that stands there and is not enough, replaced; one that is missing, added."""
    names = {"clamp_min": ("min",), "clamp_max": ("max",)}.get(clamp.name, ("min", "max"))
    if kind not in names:
        return ()
    keyword = clamp.keywords.get(kind)
    place = keyword.value if keyword is not None else clamp.operand(1 + names.index(kind))
    if place is None:
        return [added_keyword(statement, clamp.node, f"{kind}={typed(value)}")]
    return _raised(statement, place, value, enough=(lambda was: was <= value) if kind == "max" else None)


def _other_bounds(statement: Statement, clamp: Found, value: float) -> Sequence[Splice]:
    """Bounds from below and above that stand there, next to -1 and 1, replaced; nothing where one is missing."""
    keywords = [clamp.keywords[kind].value if kind in clamp.keywords else None for kind in ("min", "max")]
    places = [keyword or clamp.operand(1 + number) for number, keyword in enumerate(keywords)]
    known = [(place, was) for place in places if place is not None and (was := value_of(place)) is not None]
    if len(known) < 2 or clamp.name not in ("clamp", "clip"):
        return ()
    return [statement.instead(place, number(math.copysign(value, was))) for place, was in known if abs(was) > value]


def _raised(
    statement: Statement, place: ast.expr, value: float, enough: Callable[[float], bool] | None = None
) -> Sequence[Splice]:
    """Another number in the place of one that is too small, or that has a name."""
    was = _at_least(place)
    if was is not None:
        there = enough(was) if enough is not None else was >= value
        return () if there else [statement.instead(place, typed(value))]
    return [statement.instead(place, f"max({statement.text(place)}, {typed(value)})")] if is_eps(place) else ()


def _at_least(node: ast.expr) -> float | None:
    """The number that a part spells, or the one below which ``max(eps, 1e-6)`` does not come."""
    if isinstance(node, ast.Call) and dotted(node.func) == "max":
        return max((value for each in node.args if (value := value_of(each)) is not None), default=None)
    return value_of(node)


def _added(node: ast.expr) -> ast.expr | None:
    """The small number that is added to a part already, or stands as its bound."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        ends = (node.right, node.left)
        return next((end for end in ends if is_eps(end) or abs(_at_least(end) or 1.0) < 0.1), None)
    call = as_call(node, "add", *_CLAMPS)
    if call is None or call.is_operator:
        return None
    return call.operand(1) or next((call.keywords[name].value for name in ("min",) if name in call.keywords), None)


def _put(statement: Statement, found: Found, place: ast.expr, write: Callable[[str], str], *, atom: bool) -> Splice:
    """An operand written otherwise, in parentheses where its place asks for them."""
    text = write(statement.atom(place) if atom else statement.summand(place))
    inner = found.is_operator or (found.is_method and place is found.operands[0])
    if not inner:
        return statement.instead(place, text)
    alone = isinstance(found.node, ast.AugAssign) or atom
    return statement.instead_of_all(place, text if alone else f"({text})")
