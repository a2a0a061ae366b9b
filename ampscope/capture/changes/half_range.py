"""These forms keep a call within the range of a half dtype: constants, factors, the call in float32."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ampscope import provenance
from ampscope.capture.changes.call_form import Call, CallForm, CallPlace
from ampscope.capture.changes.failure import FailedCall
from ampscope.capture.keep_fp32 import in_float32
from ampscope.provenance import op_name
from ampscope.trace.dtypes import FINFO, HALF_DTYPES, FloatInfo
from ampscope.trace.schema import EdgeRow, Form, Phase

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


#: Ops to which autocast gives operands in its own dtype.
_CAST_FOR = frozenset(
    {
        "mm",
        "bmm",
        "addmm",
        "addbmm",
        "baddbmm",
        "addmv",
        "addr",
        "mv",
        "linear",
        "convolution",
        "_convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
        "prelu",
    }
)
_PRODUCTS = frozenset(
    {"matmul", "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "einsum", "linear", "tensordot", "bilinear"}
)
_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
_NORMS = frozenset({"norm", "linalg_norm", "linalg_vector_norm", "normalize", "cosine_similarity", "pairwise_distance"})
#: Functions that code may call where an op of another name runs.
_CALLED: dict[str, frozenset[str]] = {
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "mv", "dot", "addmv"), _PRODUCTS),
    "convolution": _CONVOLUTIONS,
    "linalg_vector_norm": _NORMS,
    "pow": frozenset({"pow", "square", "__ipow__"}),
    "mul": frozenset({"mul", "normalize", "cosine_similarity"}),
    "div": frozenset({"div", "normalize", "cosine_similarity"}),
    "_softmax": frozenset({"softmax", "cross_entropy"}),
    "_log_softmax": frozenset({"log_softmax", "cross_entropy"}),
    "mse_loss": frozenset({"mse_loss"}),
    "mean": frozenset({"mean"}),
    "sum": frozenset({"sum", "nansum", "einsum"}),
}
#: Ops between the failed one and its readers that are followed.
_REACH = 40


class Float32Call(CallForm):
    """A call on float32 operands, outside of autocast; what it gives stays float32."""

    form = Form.IN_FLOAT32

    def instead(self, call: Call) -> Any:
        """See `CallForm.instead`."""
        return in_float32(call.function)(*call.args, **call.kwargs)


def of_call(call: FailedCall) -> Iterator[CallForm]:
    """The call alone in float32, unless it is a module of torch's own, or the next product cannot hold what it gives.

    An op of backward has the dtype of what its forward got: what fails there fails behind the cast of its gradient.
    """
    site = call.site
    if call.in_backward or not HALF_DTYPES.intersection(site.out_dtypes) or call.name == "_to_copy":
        return
    if hasattr(torch.nn, site.module_type) or not _fits(call):
        return
    yield Float32Call(_CALLED.get(call.name, frozenset({call.name.lstrip("_")})))


def _fits(call: FailedCall) -> bool:
    """Whether no product, as far as everything in float32 has shown, reads what half precision does not hold."""
    graph, wide = call.wide_graph, call.wide
    if graph is None or wide is None:
        return True
    info = FINFO[next(dtype for dtype in call.site.out_dtypes if dtype in HALF_DTYPES)]
    front, seen = [wide.seq], {wide.seq}
    while front and len(seen) < _REACH:
        edges = [edge for seq in front for edge in graph.readers[seq] if graph.site(edge.seq).phase != Phase.BACKWARD]
        products = [edge for edge in edges if _is_product(graph.site(edge.seq).op)]
        if any(_largest(graph, edge) > info.max for edge in products):
            return False
        front = list(dict.fromkeys(edge.seq for edge in edges if edge.seq not in seen))
        seen.update(front)
    return True


def _is_product(op: str) -> bool:
    """Whether autocast gives an op its operands in its own dtype."""
    name = provenance.op_name(op)
    return name in _CAST_FOR or name.startswith("_scaled_dot_product")


def _largest(graph: provenance.Graph, edge: EdgeRow) -> float:
    row = graph.output(edge.from_seq, edge.from_out)
    return max((abs(end) for end in (row.min, row.max) if end is not None and math.isfinite(end)), default=0.0)


_SCALED_PRODUCTS = frozenset({"matmul", "mm", "bmm"})
#: What a product of several dimensions is reshaped with.
_VIEWS = frozenset({"view", "_unsafe_view", "reshape"})
_SCALINGS = frozenset({"mul", "div"})


class ScaleFirst(CallForm):
    """``(a * s) @ b`` for ``(a @ b) * s``; a division likewise.

    Args:
        factor: The number.
    """

    form = Form.SCALE_FIRST

    def __init__(self, factor: float) -> None:
        super().__init__(_SCALED_PRODUCTS, argument=0, value=factor)
        self._factor = factor
        self._product: Tensor | None = None

    def instead(self, call: Call) -> Any:
        """See `CallForm.instead`; of the scaling after it, the product as it is."""
        if call.name in _SCALINGS:
            product, self._product = self._product, None
            return product
        self._product = call.with_operand(0, call.operands[0] * self._factor)()
        return self._product

    def belongs(self, call: Call) -> bool:
        """See `CallForm.belongs`: the scaling of that product."""
        if self._product is None or call.name not in _SCALINGS or len(call.operands) < 2:
            return False
        one, other = call.operands[:2]
        mirrored = call.name == "mul" and other is self._product and isinstance(one, (int, float))
        return mirrored or (one is self._product and isinstance(other, (int, float)))

    def before(self, call: Call) -> Any:
        """See `CallForm.before`: the product, scaled after."""
        return call() * self._factor


def of_product(call: FailedCall) -> Iterator[CallForm]:
    """The scale of a product put on its first factor, where the product alone leaves the range and scaled would not."""
    if call.in_backward or call.name not in ("mm", "bmm"):
        return
    factor = _scaling(call)
    if factor is None or not 0 < abs(factor) < 1:
        return
    limit = FINFO.get(next(iter(call.site.out_dtypes), ""))
    row = call.wide
    ends = [abs(end) for end in (row.min, row.max) if end is not None] if row is not None else []
    if limit is None or any(math.isfinite(end) and end * abs(factor) > limit.max for end in ends):
        return
    yield ScaleFirst(factor)


def _scaling(call: FailedCall) -> float | None:
    """The number by which the only reader multiplies the result of a product; None where it does something else."""
    reader, seq = None, call.seq
    while reader is None:
        readers = {edge.seq for edge in call.graph.readers[seq] if call.graph.site(edge.seq).phase != Phase.BACKWARD}
        if len(readers) != 1:
            return None
        (seq,) = readers
        reader = None if op_name(call.graph.site(seq).op) in _VIEWS else seq
    name, number = op_name(call.graph.site(reader).op), call.graph.scalars(reader).get("other")
    if not isinstance(number, (int, float)) or isinstance(number, bool) or not number:
        return None
    return {"mul": float(number), "div": 1 / number}.get(name)
