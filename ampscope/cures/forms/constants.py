"""Numbers that a call is given are replaced by such as its dtype holds."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ampscope.cures.call_form import Call, CallForm, CallPlace, Written
from ampscope.cures.cure_form import CureForm, TrialTurn, exactly, value, was
from ampscope.cures.failed_op import FailedOp
from ampscope.cures.rewriting.found_call import Asked, TorchCall
from ampscope.cures.rewriting.literals import added_keyword, below_one, end_of_half, is_eps, literal, value_of
from ampscope.cures.rewriting.statement import Splice, Statement, dotted, is_plain
from ampscope.trace.dtypes import FINFO, FloatInfo
from ampscope.trace.schema import Form, Phase

if TYPE_CHECKING:
    from torch import Tensor

#: How many ops back a number is looked for that should have kept an operand away from where the op is not defined.
REACH = 8
#: The operand that is not to be zero, or one, of ops that are not defined or have no slope there.
_DELICATE = {
    **dict.fromkeys(("log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "pow", "linalg_vector_norm", "logit"), 0),
    **dict.fromkeys(("acos", "asin", "atanh"), 0),
    **dict.fromkeys(("div", "true_divide", "xlogy"), 1),
}
_ADDS = frozenset({"add", "sub", "rsub"})
_BOUNDS = frozenset({"clamp", "clamp_min", "clamp_max", "maximum", "minimum", "threshold"})
#: Makes a number that another op reads into a tensor of its own.
_NUMBER = "scalar_tensor"
#: Ops that write a number as it is; of the others that are given one, sums and products make values of it.
_FILLS = frozenset({"masked_fill", "where", "full", "full_like", "fill", "new_full", "index_fill", "constant_pad_nd"})
_COMPUTES = frozenset({"mul", "add", "sub", "rsub"})
#: Stands for minus infinity beside values of an ordinary size, which may be added to it.
_FAR = 1e4
#: Numbers that functions without a signature are given where code names none.
_UNSEEN_DEFAULTS: dict[str, Mapping[str, float]] = {
    "cosine_similarity": {"eps": 1e-8},
    "pairwise_distance": {"eps": 1e-6},
}


class Constant(CallForm):
    """A call with another number in the place of one that it is given, by its code or by default.

    Args:
        was: The number.
        value: What goes in.
        at: The line that makes the call.
        harmed: What the call gave where the number was missed, which was not well; None for nothing that was finite.
    """

    form = Form.CONSTANT
    same_function = True
    live_as = "constant"

    def __init__(self, was: float, value: float, at: CallPlace, harmed: float | None) -> None:
        super().__init__(frozenset(), value=value, was=was)
        self.at = at
        self._harmed = harmed

    def fits(self, call: Call) -> bool:
        """See `CallForm.fits`."""
        return any(map(self._is_it, (*call.args, *call.kwargs.values()))) or bool(self._defaults(call))

    def instead(self, call: Call) -> object:
        """See `CallForm.instead`."""
        args = tuple(self._other(value) for value in call.args)
        kwargs = {name: self._other(value) for name, value in call.kwargs.items()}
        return call._replace(args=args, kwargs={**kwargs, **self._defaults(call)})()

    def good(self, before: Tensor) -> Tensor:
        """See `CallForm.good`."""
        finite = before.isfinite()
        return finite if self._harmed is None else finite & (before != self._harmed)

    def _defaults(self, call: Call) -> dict[str, float]:
        """The number by the name of the parameter that has it where it is not given."""
        given = len(call.args)
        defaults = _defaults(call.function, call.name)
        named = [name for place, name in enumerate(defaults) if place >= given and name not in call.kwargs]
        return {name: self.value or 0.0 for name in named if self._is_it(defaults[name])}

    def _is_it(self, value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value == self.was

    def _other(self, value: Any) -> Any:
        return self.value if self._is_it(value) else value

    @property
    def told(self) -> str:
        """See `CallForm.told`."""
        return f"{self.value or 0.0:g} instead of {self.was or 0.0:g}"

    @classmethod
    def read(cls, written: Written, at: CallPlace) -> CallForm:
        """See `CallForm.read`."""
        return Constant(float(written.get("was") or 0.0), float(written.get("value") or 0.0), at, None)


@cache
def _defaults(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """Every parameter of a function with its default, in order; what is not known has none."""
    unseen = _UNSEEN_DEFAULTS.get(name)
    if unseen is not None:
        positions: dict[str, Any] = dict.fromkeys(("x1", "x2", "dim" if name == "cosine_similarity" else "p"))
        return positions | dict(unseen)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    return {name: each.default for name, each in parameters.items()}


def of_lost_constant(failed: FailedOp) -> Iterator[CallForm]:
    """The nearest constant upstream that was to keep the operand from where the op is not defined, and was rounded."""
    if failed.name not in _DELICATE or not failed.is_of_range:
        return
    for seq in _upstream(failed, _DELICATE[failed.name]):
        lost = _lost(failed, seq)
        if lost is not None:
            was, value, harmed = lost
            yield Constant(was, value, failed.place_of(seq), None if failed.in_backward else harmed)
            return


def of_literal(failed: FailedOp) -> Iterator[CallForm]:
    """A finite number of the code that its dtype makes infinite: where it is written, or where that is cast."""
    info = _half(failed.site.out_dtypes)
    if info is None or failed.in_backward or not failed.is_of_range:
        return
    for seq in [failed.seq, *(_upstream(failed, 0) if failed.name == "_to_copy" else ())]:
        name = failed.name_of(seq)
        for _, number in _numbers(failed, seq):
            if name in _FILLS | _COMPUTES and info.overflows(number):
                end = info.max if name in _FILLS else min(_FAR, info.max)
                yield Constant(number, math.copysign(end, number), failed.place_of(seq), None)
                return


def _upstream(failed: FailedOp, operand: int) -> Iterator[int]:
    """The ops before, the nearest first, from one operand on."""
    edge = failed.edge(operand)
    front = [edge.from_seq] if edge is not None else []
    seen: set[int] = set()
    for _ in range(REACH):
        yield from (seq for seq in front if seq not in seen)
        seen.update(front)
        front = list(dict.fromkeys(each.from_seq for seq in front for each in failed.graph.inputs[seq]))


def _lost(failed: FailedOp, seq: int) -> tuple[float, float, float] | None:
    """A number that the dtype rounds away: what it was, what survives in its place, and what it has become."""
    site = failed.graph.site(seq)
    name = failed.name_of(seq)
    info = _half(site.out_dtypes) or (_half(failed.site.in_dtypes) if name == _NUMBER else None)
    if info is None or site.phase not in (Phase.FORWARD, Phase.LOSS) or name not in _ADDS | _BOUNDS | {_NUMBER}:
        return None
    for argument, number in _numbers(failed, seq):
        if argument == "alpha" or not _spans(failed, seq, name):
            continue
        if info.vanishes(number):
            return number, math.copysign(info.survivor, number), 0.0
        if name in _BOUNDS and info.rounds_to_one(number):
            return number, 1 - info.eps, 1.0
    return None


def _spans(failed: FailedOp, seq: int, name: str) -> bool:
    """Whether what was measured of a result may be where the number was missed: at 0, or at a bound of 1."""
    row = failed.graph.output(seq)
    if name == _NUMBER or row.min is None or row.max is None:
        return True
    return row.min <= 0.0 <= row.max or row.max >= 1.0


def _numbers(failed: FailedOp, seq: int) -> list[tuple[str, float]]:
    scalars = failed.graph.scalars(seq)
    return [(name, float(x)) for name, x in scalars.items() if isinstance(x, (int, float)) and not isinstance(x, bool)]


def _half(dtypes: tuple[str, ...]) -> FloatInfo | None:
    """The facts of the first dtype, if it is one that autocast computes in."""
    info = FINFO.get(next(iter(dtypes), ""))
    return info if info is not None and info.is_half else None


# -- in the user's statement -------------------------------------------------------------------------------------------


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


def _write(statement: Statement, asked: Asked) -> Sequence[Splice]:
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


def _mirrored(statement: Statement, found: TorchCall | None, asked: Asked) -> Sequence[Splice]:
    """The other end of a stretch about zero, where one end becomes 1: it becomes -1 in the same dtype."""
    value, was = asked.value or 0.0, asked.was or 0.0
    if not 0.9 < abs(value) < 1 or not 0.9 < abs(was) < 1:
        return ()
    places = _places(statement, found, asked._replace(was=-was))
    return [statement.instead(places[0], _written(statement, found, -value))] if len(places) == 1 else ()


def _named(statement: Statement, found: TorchCall, value: float, was: float | None) -> Sequence[Splice]:
    """A small number that has a name, kept from being smaller."""
    given = [*found.operands, *(each.value for each in found.keywords.values())]
    names = [each for each in given if is_eps(each)]
    if len(names) != 1 or was is None or not 0 < was < value:
        return ()
    return [statement.instead(names[0], f"max({statement.text(names[0])}, {literal(value)})")]


def _places(statement: Statement, found: TorchCall | None, asked: Asked) -> list[ast.expr]:
    """Finds where the number stands in the call, or else in the whole statement; callers use one that is alone."""
    if asked.was is None:
        return []
    if found is not None:
        given = [*found.operands, *(each.value for each in found.keywords.values())]
        inside = [place for each in given for place in _spelled(each, asked.was)]
        if inside:
            return inside
    return [place for node in statement.tree.body for place in _spelled(node, asked.was)]


def _spelled(node: ast.AST, was: float) -> list[ast.expr]:
    """The parts that spell a number, the outermost of each."""
    value = value_of(node) if isinstance(node, ast.expr) else None
    if value is not None and math.isclose(value, was, rel_tol=1e-12) and isinstance(node, ast.expr):
        return [node]
    if isinstance(node, ast.UnaryOp) and value is not None:
        return []  # the number without its sign is another one
    return [place for child in ast.iter_child_nodes(node) for place in _spelled(child, was)]


def _written(statement: Statement, found: TorchCall | None, value: float) -> str:
    """The number as it is written: the end of a dtype's range by the dtype of the tensor, where that has a name."""
    dtype, end = end_of_half(value)
    if not end:
        return literal(below_one(value))
    tensor = found.operands[0] if found is not None and found.operands and not found.is_operator else None
    if tensor is None or not (dotted(tensor) and is_plain(tensor)):
        return f"{statement.spelled('torch.finfo')}({statement.spelled(dtype)}).{end}"
    return f"{statement.spelled('torch.finfo')}({statement.text(tensor)}.dtype).{end}"


def _default(statement: Statement, found: TorchCall, asked: Asked) -> Sequence[Splice]:
    """The keyword by which a function takes the number, where the call leaves it out."""
    keyword, default = _DEFAULTS.get(found.name, ("", math.nan))
    is_default = asked.was is None or math.isclose(asked.was, default, rel_tol=1e-6)
    given = keyword in found.keywords or len(found.operands) > _PLACES.get(found.name, len(found.operands))
    if not keyword or not is_default or given:
        return ()
    return [added_keyword(statement, found.node, f"{keyword}={literal(asked.value or default)}")]


def _instead(asked: Asked) -> str:
    return f"{value(asked)} instead of {was(asked)}"


FORMS = (
    CureForm(
        form=Form.CONSTANT,
        tried=lambda asked: f"{_instead(asked)} in {asked.call}",
        sentence=lambda asked: f"Give {asked.call} {_instead(asked)}, which its dtype does not hold.",
        code=lambda asked: f"{exactly(asked.value)}  # instead of {exactly(asked.was)}",
        turn=TrialTurn.CONSTANT,
        rules=(of_lost_constant, of_literal),
        live=(Constant,),
        rewriting=_write,
    ),
)
