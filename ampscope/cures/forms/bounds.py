"""Operands are kept away from where an op is not defined, or infinite, or has no finite slope."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Sequence

from ampscope.cures.call_form import Call, CallForm, CallPlace, Written, calls_of
from ampscope.cures.cure_form import CureForm, TrialTurn, coded, operand, value
from ampscope.cures.failed_op import REACH, FailedOp, FailedOperand
from ampscope.cures.forms import means
from ampscope.cures.forms.logarithms import LOGARITHMS
from ampscope.cures.forms.safe_where import DIVISIONS, DIVISORS
from ampscope.cures.rewriting.found_call import Asked, TorchCall, as_call
from ampscope.cures.rewriting.literals import added_keyword, is_eps, literal, typed, value_of
from ampscope.cures.rewriting.names import is_number
from ampscope.cures.rewriting.statement import Splice, Statement, dotted
from ampscope.trace.dtypes import FINFO
from ampscope.trace.schema import Form, Phase

_ROOTS = frozenset({"sqrt", "rsqrt", "pow"})
#: Functions that are defined between -1 and 1, with an infinite slope or value there, by how code may call them too.
_ENDING = {"acos": "arccos", "asin": "arcsin", "atanh": "arctanh", "erfinv": "special_erfinv"}
#: How far beyond 1 an operand may be by rounding, in units of its dtype's eps.
_ROUNDED = 8.0
_EXPONENTIALS = {"exp": 1.0, "expm1": 1.0, "exp2": math.log(2.0)}
#: A bound that does not make large what is divided by it, by dtype.
_USUAL = {"float16": 1e-4}
_OF_OTHERS = 1e-6
#: The largest bound of a divisor whose values that are not zero lie well above it.
_LARGER = 1e-2


class OperandBound(CallForm):
    """An operand that is bounded.

    Args:
        calls: See `CallForm`.
        argument: The operand.
        value: The bound.
        lowest: It is one from below, not from above.
    """

    form = Form.OPERAND_BOUND
    live_as = "bound"

    def __init__(self, calls: frozenset[str], argument: int, value: float, *, lowest: bool) -> None:
        super().__init__(calls, argument=argument, value=value)
        self.lowest = lowest

    def instead(self, call: Call) -> object:
        """See `CallForm.instead`."""
        number = self.argument or 0
        given = call.tensor(number)
        if given is None:
            return NotImplemented
        bounded = given.clamp(min=self.value) if self.lowest else given.clamp(max=self.value)
        return call.with_operand(number, bounded)()

    @property
    def told(self) -> str:
        """See `CallForm.told`."""
        return f"the operand of {self.asked} {self._kept}"

    @property
    def _kept(self) -> str:
        return f"kept at {'least' if self.lowest else 'most'} {self.value or 0.0:g}"

    def written(self) -> Written:
        """See `CallForm.written`."""
        return {**super().written(), "lowest": self.lowest}

    @classmethod
    def read(cls, written: Written, at: CallPlace) -> CallForm:
        """See `CallForm.read`."""
        argument, value = int(written.get("argument") or 0), float(written.get("value") or 0.0)
        return cls(calls_of(written), argument, value, lowest=bool(written.get("lowest")))


class DivisorBound(OperandBound):
    """A divisor that is bounded from below; of a quotient it is the second operand."""

    live_as = "divisor"

    def instead(self, call: Call) -> object:
        """See `CallForm.instead`."""
        self.argument = int(call.name == "div")
        return super().instead(call)

    @property
    def told(self) -> str:
        """See `CallForm.told`."""
        return f"the divisor {self._kept}"


class EndsBound(OperandBound):
    """An operand that is kept from 1 and from -1."""

    live_as = "ends"

    def instead(self, call: Call) -> object:
        """See `CallForm.instead`."""
        given, most = call.tensor(), self.value or 0.0
        return call.with_operand(0, given.clamp(-most, most))() if given is not None else NotImplemented

    def before(self, call: Call) -> object:
        """See `CallForm.before`: without what the bound is for."""
        return call().masked_fill(call.operands[0].abs() > (self.value or 0.0), math.nan)

    @property
    def told(self) -> str:
        """See `CallForm.told`."""
        value = self.value or 0.0
        return f"the operand of {self.asked} kept between -{value!r} and {value!r}"


class AddedEps(CallForm):
    """A constant that is added to an operand."""

    form = Form.ADDED_EPS

    def instead(self, call: Call) -> object:
        """See `CallForm.instead`."""
        number = self.argument or 0
        given = call.tensor(number)
        return call.with_operand(number, given + (self.value or 0.0))() if given is not None else NotImplemented


def bound_of_logarithm(failed: FailedOp) -> Iterator[CallForm]:
    """The operand of a logarithm kept away from zero, by a normal number of its dtype."""
    given = failed.operand(0) if failed.name in LOGARITHMS else None
    if given is not None and given.dtype in FINFO:
        yield OperandBound(frozenset({failed.name}), 0, FINFO[given.dtype].survivor, lowest=True)


def bound_of_division(failed: FailedOp) -> Iterator[CallForm]:
    """A divisor that has no sign kept away from zero."""
    given = failed.operand(DIVISORS[failed.name]) if failed.name in DIVISORS else None
    if given is None or given.is_negative:
        return
    whole = given.dtype not in FINFO  # a count
    value = 1.0 if whole else _usual(given)
    bound = DivisorBound(DIVISIONS, DIVISORS[failed.name], value, lowest=True)
    larger = 0.0 if whole or given.smallest is None else min(_LARGER, _power_of_ten(given.smallest) / 10)
    if larger > value:
        bound.milder = DivisorBound(DIVISIONS, DIVISORS[failed.name], larger, lowest=True)
    yield bound


def bound_of_negative_root(failed: FailedOp) -> Iterator[CallForm]:
    """The operand of a root kept from being negative; then also from zero, where the slope is infinite."""
    given = failed.operand(0) if failed.name in _ROOTS and not failed.in_backward else None
    exponent = failed.graph.scalars(failed.seq).get("exponent", 0.5)
    fraction = isinstance(exponent, float) and not exponent.is_integer()
    if given is None or given.dtype not in FINFO or not given.is_negative or not fraction:
        return
    if failed.name != "rsqrt" and exponent > 0:
        yield OperandBound(frozenset({failed.name}), 0, 0.0, lowest=True)
    yield OperandBound(frozenset({failed.name}), 0, _usual(given), lowest=True)


def bound_of_ends(failed: FailedOp) -> Iterator[CallForm]:
    """The operand of a function that ends at 1 and at -1 kept from there, unless it is beyond by more than rounding."""
    given = failed.operand(0) if failed.name in _ENDING else None
    if given is None or given.dtype not in FINFO or given.low is None or given.high is None:
        return
    eps = FINFO[given.dtype].eps
    if max(-given.low, given.high) <= 1 + _ROUNDED * eps:
        calls = frozenset({failed.name, _ENDING[failed.name]})
        yield EndsBound(calls, 0, 1 - max(eps, _OF_OTHERS), lowest=False)


def bound_of_slope(failed: FailedOp) -> Iterator[CallForm]:
    """A constant under the root whose slope is infinite at zero."""
    given = failed.operand(0) if failed.name in ("sqrt", "pow") and failed.in_backward else None
    if given is not None and given.dtype in FINFO and not given.is_negative:
        yield AddedEps(frozenset({failed.name}), argument=0, value=_USUAL.get(given.dtype, _OF_OTHERS))


def bound_of_exponential(failed: FailedOp) -> Iterator[CallForm]:
    """The exponent kept below the logarithm of the largest number that products and sums of the power still hold."""
    dtype = next(iter(failed.site.out_dtypes), "")
    if failed.name in _EXPONENTIALS and dtype in FINFO and not (failed.in_backward or failed.is_of_range):
        most = math.log(FINFO[dtype].max) - math.log(_growth(failed, failed.seq, REACH))
        largest = math.floor(most / _EXPONENTIALS[failed.name])
        yield OperandBound(frozenset({failed.name}), 0, float(largest), lowest=False)


def _growth(failed: FailedOp, seq: int, reach: int) -> float:
    """How many times larger the products and sums that read an op's result make it, at the most; at least 1."""
    readers = {edge.seq for edge in failed.graph.readers[seq] if failed.graph.site(edge.seq).phase != Phase.BACKWARD}
    grown = [_factor(failed, each, seq) * _growth(failed, each, reach - 1) for each in readers if reach]
    return max([1.0, *grown])


def _factor(failed: FailedOp, seq: int, given: int) -> float:
    """How many times larger an op makes what one gave; 0 for another kind of op."""
    kind = failed.name_of(seq)
    if kind in ("sum", "mean"):
        return failed.graph.output(given).numel / max(1, failed.graph.output(seq).numel)
    if kind != "mul":
        return float(kind == "_to_copy")
    others = [
        failed.graph.output(edge.from_seq, edge.from_out) for edge in failed.graph.inputs[seq] if edge.from_seq != given
    ]
    number = failed.graph.scalars(seq).get("other")
    ends = [end for row in others for end in (row.min, row.max) if end is not None]
    known = [abs(end) for end in (*ends, number) if isinstance(end, (int, float)) and math.isfinite(end)]
    return max(known, default=1.0)


def _usual(given: FailedOperand) -> float:
    """A bound by which can be divided, below all of an operand's values that are not zero, and a normal number."""
    value = _USUAL.get(given.dtype, _OF_OTHERS)
    if given.smallest is None or given.smallest >= value or given.is_negative:
        return value
    return max(_power_of_ten(given.smallest), FINFO[given.dtype].survivor)


def _power_of_ten(largest: float) -> float:
    """The largest power of ten that is not above a number."""
    return float(f"1e{math.floor(math.log10(largest))}")


# -- in the user's statement -------------------------------------------------------------------------------------------


#: Functions whose result is too large, rather than undefined, at the end of their domain.
_GROWING = frozenset({"exp", "exp2", "expm1", "square", "cosh", "sinh"})
#: Functions that are undefined, or infinite, at and below zero.
_FALLING = frozenset(
    {"log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "div", "true_divide", "divide", "pow", "logit"}
)
#: Functions that are defined on a stretch about zero.
_BOTH_SIDES = frozenset({*_ENDING, *_ENDING.values()})
_CLAMPS = ("clamp", "clip", "clamp_min", "clamp_max")


def _write_bound(statement: Statement, asked: Asked) -> Sequence[Splice]:
    """``log(x)`` becomes ``log(x.clamp(min=1e-7))``."""
    found = asked.all_found(statement)
    if asked.name in means.DEVIATIONS or (asked.name in means.DIVIDING and asked.argument is None):
        return [splice for each in found for splice in means.write(statement, each)]
    if len(found) > 1 and any(each.is_operator or each.operand(1) is not None for each in found):
        return ()  # which of the operands are tensors is not seen
    return [splice for each in found for splice in _bounded(statement, each, asked)]


def _bounded(statement: Statement, found: TorchCall, asked: Asked) -> Sequence[Splice]:
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


def _write_eps(statement: Statement, asked: Asked) -> Sequence[Splice]:
    """``a / b`` becomes ``a / (b + 1e-6)``; a smaller number that stands there is raised."""
    return [splice for each in asked.all_found(statement) for splice in _with_eps(statement, each, asked)]


def _with_eps(statement: Statement, found: TorchCall, asked: Asked) -> Sequence[Splice]:
    place, value = _operand(found, asked), asked.value
    if place is None or value is None or is_number(place):
        return ()
    added = _added(place)
    if added is not None:
        return _raised(statement, added, value)
    return [_put(statement, found, place, lambda text: f"{text} + {typed(value)}", atom=False)]


def _operand(found: TorchCall, asked: Asked) -> ast.expr | None:
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


def _other_bound(statement: Statement, clamp: TorchCall, kind: str, value: float) -> Sequence[Splice]:
    """A bound that stands there and is not enough, replaced; one that is missing, added."""
    names = {"clamp_min": ("min",), "clamp_max": ("max",)}.get(clamp.name, ("min", "max"))
    if kind not in names:
        return ()
    keyword = clamp.keywords.get(kind)
    place = keyword.value if keyword is not None else clamp.operand(1 + names.index(kind))
    if place is None:
        return [added_keyword(statement, clamp.node, f"{kind}={typed(value)}")]
    return _raised(statement, place, value, enough=(lambda was: was <= value) if kind == "max" else None)


def _other_bounds(statement: Statement, clamp: TorchCall, value: float) -> Sequence[Splice]:
    """Bounds from below and above that stand there, next to -1 and 1, replaced; nothing where one is missing."""
    keywords = [clamp.keywords[kind].value if kind in clamp.keywords else None for kind in ("min", "max")]
    places = [keyword or clamp.operand(1 + number) for number, keyword in enumerate(keywords)]
    known = [(place, was) for place in places if place is not None and (was := value_of(place)) is not None]
    if len(known) < 2 or clamp.name not in ("clamp", "clip"):
        return ()
    return [statement.instead(place, literal(math.copysign(value, was))) for place, was in known if abs(was) > value]


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


def _put(statement: Statement, found: TorchCall, place: ast.expr, write: Callable[[str], str], *, atom: bool) -> Splice:
    """An operand written otherwise, in parentheses where its place asks for them.

    Args:
        statement: The user's statement.
        found: The call in it.
        place: The operand.
        write: Makes the new text of the old one.
        atom: Whether `write` calls a method of what it is given, so that the new text can stand before a dot, too;
            otherwise it adds something.
    """
    text = write(statement.atom(place) if atom else statement.summand(place))
    alone = atom or isinstance(found.node, ast.AugAssign)
    bare = found.is_operator or (found.is_method and place is found.operands[0])
    return found.with_operand(statement, place, f"({text})" if bare and not alone else text)


def _side(asked: Asked) -> str:
    return "above" if asked.call in _EXPONENTIALS else "below"


def _between(asked: Asked) -> str:
    return f"between -{value(asked)} and {value(asked)}"


def _tried(asked: Asked) -> str:
    if means.is_mean(asked.call):
        return means.tried(asked)
    if asked.call in _BOTH_SIDES:
        return f"the operand of {asked.call} kept {_between(asked)}"
    return f"the {operand(asked)} bounded from {_side(asked)} by {value(asked)}"


def _sentence(asked: Asked) -> str:
    if means.is_mean(asked.call):
        return means.sentence(asked)
    if asked.call in _BOTH_SIDES:
        return f"Keep the operand of {asked.call} {_between(asked)}: there its slope is finite."
    return f"Bound the {operand(asked)} from {_side(asked)} by {value(asked)}."


def _code(asked: Asked) -> str:
    if means.is_mean(asked.call):
        return means.code(asked)
    if asked.call in _BOTH_SIDES:
        return f"y = torch.{asked.call}(x.clamp(-{value(asked)}, {value(asked)}))"
    if asked.call in ("div", "true_divide"):
        return f"y = a / b.clamp(min={coded(asked)})"
    end = "max" if asked.call in _EXPONENTIALS else "min"
    return f"y = torch.{asked.call}(x.clamp({end}={coded(asked)}){', p' if asked.call == 'pow' else ''})"


def _added_code(asked: Asked) -> str:
    if asked.call in ("div", "true_divide"):
        return f"y = a / (b + {coded(asked)})"
    return f"y = torch.{asked.call}(x + {coded(asked)}{', p' if asked.call == 'pow' else ''})"


_ALIKE = frozenset({Form.OPERAND_BOUND, Form.ADDED_EPS})
FORMS = (
    CureForm(
        form=Form.OPERAND_BOUND,
        tried=_tried,
        sentence=_sentence,
        code=_code,
        turn=TrialTurn.BOUNDED,
        rules=(
            *(means.of_mean, means.of_deviation, bound_of_logarithm, bound_of_division, bound_of_negative_root),
            *(bound_of_ends, bound_of_exponential),
        ),
        live=(OperandBound, DivisorBound, EndsBound),
        speaks_for=_ALIKE,
        rewriting=_write_bound,
        repeats=True,
    ),
    CureForm(
        form=Form.ADDED_EPS,
        tried=lambda asked: f"{value(asked)} added to the {operand(asked)}",
        sentence=lambda asked: f"Add {value(asked)} to the {operand(asked)}.",
        code=_added_code,
        turn=TrialTurn.BOUNDED,
        rules=(bound_of_slope,),
        speaks_for=_ALIKE,
        rewriting=_write_eps,
        repeats=True,
    ),
)
