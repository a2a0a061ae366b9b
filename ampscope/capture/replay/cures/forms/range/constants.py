"""A number that the code gives and its dtype does not hold, with one in its place that survives."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from torch import Tensor

from ampscope.capture.replay.cures.forms.call_form import Call, CallForm, CallPlace
from ampscope.capture.replay.cures.forms.failed_call import FailedCall
from ampscope.provenance import op_name
from ampscope.trace.dtypes import FINFO, FloatInfo
from ampscope.trace.schema import Form, Phase

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

    def __init__(self, was: float, value: float, at: CallPlace, harmed: float | None) -> None:
        super().__init__(frozenset(), value=value, was=was)
        self.at = at
        self._harmed = harmed

    def fits(self, call: Call) -> bool:
        """See `CallForm.fits`."""
        return any(map(self._is_it, (*call.args, *call.kwargs.values()))) or bool(self._defaults(call))

    def instead(self, call: Call) -> Any:
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


def of_lost_constant(call: FailedCall) -> Iterator[CallForm]:
    """The nearest constant upstream that was to keep the operand from where the op is not defined, and was rounded."""
    if call.name not in _DELICATE:
        return
    for seq in _upstream(call, _DELICATE[call.name]):
        lost = _lost(call, seq)
        if lost is not None:
            was, value, harmed = lost
            yield Constant(was, value, _place(call, seq), None if call.in_backward else harmed)
            return


def of_literal(call: FailedCall) -> Iterator[CallForm]:
    """A finite number of the code that its dtype makes infinite: where it is written, or where that is cast."""
    info = _half(call.site.out_dtypes)
    if info is None or call.in_backward:
        return
    for seq in [call.seq, *(_upstream(call, 0) if call.name == "_to_copy" else ())]:
        name = op_name(call.graph.site(seq).op)
        for _, number in _numbers(call, seq):
            if name in _FILLS | _COMPUTES and _overflows(number, info):
                end = info.max if name in _FILLS else min(_FAR, info.max)
                yield Constant(number, math.copysign(end, number), _place(call, seq), None)
                return


def _upstream(call: FailedCall, operand: int) -> Iterator[int]:
    """The ops before, the nearest first, from one operand on."""
    edge = call.edge(operand)
    front = [edge.from_seq] if edge is not None else []
    seen: set[int] = set()
    for _ in range(REACH):
        yield from (seq for seq in front if seq not in seen)
        seen.update(front)
        front = list(dict.fromkeys(each.from_seq for seq in front for each in call.graph.inputs[seq]))


def _lost(call: FailedCall, seq: int) -> tuple[float, float, float] | None:
    """A number that the dtype rounds away: what it was, what survives in its place, and what it has become."""
    site = call.graph.site(seq)
    name = op_name(site.op)
    info = _half(site.out_dtypes) or (_half(call.site.in_dtypes) if name == _NUMBER else None)
    if info is None or site.phase not in (Phase.FORWARD, Phase.LOSS) or name not in _ADDS | _BOUNDS | {_NUMBER}:
        return None
    for argument, number in _numbers(call, seq):
        if argument == "alpha" or not _spans(call, seq, name):
            continue
        if vanishes(number, info):
            return number, math.copysign(survivor(info), number), 0.0
        if name in _BOUNDS and _rounds_to_one(number, info):
            return number, 1 - info.eps, 1.0
    return None


def _spans(call: FailedCall, seq: int, name: str) -> bool:
    """Whether what was measured of a result may be where the number was missed: at 0, or at a bound of 1."""
    row = call.graph.output(seq)
    if name == _NUMBER or row.min is None or row.max is None:
        return True
    return row.min <= 0.0 <= row.max or row.max >= 1.0


def _numbers(call: FailedCall, seq: int) -> list[tuple[str, float]]:
    scalars = call.graph.scalars(seq)
    return [(name, float(x)) for name, x in scalars.items() if isinstance(x, (int, float)) and not isinstance(x, bool)]


def _place(call: FailedCall, seq: int) -> CallPlace:
    site = call.graph.site(seq)
    return CallPlace(site.file, site.line)


# -- what a dtype makes of a number -----------------------------------------------------------------------------------


def _half(dtypes: tuple[str, ...]) -> FloatInfo | None:
    """The facts of the first dtype, if it is one that autocast computes in."""
    info = FINFO.get(next(iter(dtypes), ""))
    return info if info is not None and info.is_half else None


def vanishes(number: float, info: FloatInfo) -> bool:
    """Whether a number other than zero becomes zero: half the smallest one does, as the even neighbour."""
    return 0 < abs(number) <= info.smallest_subnormal / 2


def _rounds_to_one(number: float, info: FloatInfo) -> bool:
    """Whether a bound just below 1 becomes 1: below it numbers lie half as far apart as above."""
    return number < 1 and 1 - number <= info.eps / 4


def _overflows(number: float, info: FloatInfo) -> bool:
    """Whether a finite number becomes infinite: from half a spacing beyond the largest on."""
    return math.isfinite(number) and abs(number) >= info.max + info.eps * 2.0 ** (info.top - 2)


def survivor(info: FloatInfo) -> float:
    """The smallest power of ten that is a normal number of the dtype."""
    return float(f"1e{math.ceil(math.log10(info.smallest_normal))}")
