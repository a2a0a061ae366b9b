"""The call that failed is made in float32, alone."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence

from ampscope.cures.call_form import Call, CallForm
from ampscope.cures.cure_form import CureForm, TrialTurn
from ampscope.cures.failed_op import FailedOp
from ampscope.cures.forms.logarithms import LOGARITHMS
from ampscope.cures.rewriting.found_call import Asked, TorchCall, as_call
from ampscope.cures.rewriting.names import is_number, path_of
from ampscope.cures.rewriting.statement import Splice, Statement, dotted, is_plain
from ampscope.provenance import Graph, op_name
from ampscope.trace.dtypes import FINFO, HALF_DTYPES
from ampscope.trace.schema import EdgeRow, Form, Phase

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
    live_as = "in_float32"
    in_loss_alone = True

    def instead(self, call: Call) -> object:
        """See `CallForm.instead`."""
        return self.lent.in_float32(call.function)(*call.args, **call.kwargs)

    @property
    def told(self) -> str:
        """See `CallForm.told`."""
        return f"{'the logarithm' if self.calls == LOGARITHMS else self.asked} in float32"


def of_call(failed: FailedOp) -> Iterator[CallForm]:
    """The call alone in float32, unless it is a module of torch's own, or the next product cannot hold what it gives.

    An op of backward has the dtype of what its forward got: what fails there fails behind the cast of its gradient.
    """
    from torch import nn

    site = failed.site
    if not failed.is_of_range or failed.is_converted:
        return
    if failed.in_backward or not HALF_DTYPES.intersection(site.out_dtypes) or failed.name == "_to_copy":
        return
    if hasattr(nn, site.module_type) or not _fits(failed):
        return
    yield Float32Call(_CALLED.get(failed.name, frozenset({failed.name.lstrip("_")})))


def _fits(failed: FailedOp) -> bool:
    """Whether no product, as far as everything in float32 has shown, reads what half precision does not hold."""
    graph, wide = failed.wide_graph, failed.wide
    if graph is None or wide is None:
        return True
    info = FINFO[next(dtype for dtype in failed.site.out_dtypes if dtype in HALF_DTYPES)]
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
    name = op_name(op)
    return name in _CAST_FOR or name.startswith("_scaled_dot_product")


def _largest(graph: Graph, edge: EdgeRow) -> float:
    row = graph.output(edge.from_seq, edge.from_out)
    return max((abs(end) for end in (row.min, row.max) if end is not None and math.isfinite(end)), default=0.0)


# -- in the user's statement -------------------------------------------------------------------------------------------


#: Products, which autocast runs in half precision whatever dtype they are given.
_OF_TWO = frozenset({"matmul", "mm", "bmm", "mv", "dot", "inner", "tensordot", "prelu", "linear", "bilinear"})
_SUMMED = frozenset({"addmm", "baddbmm", "addbmm", "addmv", "addr"})  #: after a tensor that is added to the product
_IN_HALF = _OF_TWO | _SUMMED | _CONVOLUTIONS | {"einsum", "scaled_dot_product_attention"}
#: What a line may call beside a product and runs as well outside autocast: views and what follows its operands' dtype.
_FOLLOWING = frozenset(
    {"transpose", "permute", "view", "reshape", "contiguous", "unsqueeze", "squeeze", "flatten", "expand", "chunk"}
    | {"t", "float", "softmax", "size", "swapaxes", "sum", "mean", "clamp", "relu", "tanh", "sigmoid", "sqrt", "len"}
)


def _write(statement: Statement, asked: Asked) -> Sequence[Splice]:
    """``x.sum()`` becomes ``x.float().sum()``; a product goes into a block without autocast as well."""
    calls = asked.all_found(statement)
    if not calls or any(isinstance(each.node, ast.AugAssign) for each in calls):
        return ()
    if calls[0].name not in _IN_HALF:
        unclear = len(calls) > 1 and any(each.is_operator for each in calls)
        return [] if unclear else [splice for each in calls for splice in _given_float(statement, each, asked)]
    return _product(statement, calls[0]) if len(calls) == 1 else ()


def _given_float(statement: Statement, found: TorchCall, asked: Asked) -> Sequence[Splice]:
    place = found.operand(asked.argument or 0)
    return [_float(statement, found, place)] if place is not None and _may_cast(place) else ()


def _product(statement: Statement, found: TorchCall) -> Sequence[Splice]:
    """A product on float32 operands, in a block that autocast does not reach."""
    operands = _factors(found)
    if not operands or not _runs_alone(statement, found):
        return ()
    device = next((statement.text(each) for each in _tensors(operands)), "")
    if not device:
        return ()
    casts = [_float(statement, found, each) for each in operands if _may_cast(each)]
    body = statement.changed(casts)
    block = f"with {statement.spelled('torch.autocast')}({device}.device.type, enabled=False):\n    "
    return [Splice(0, len(statement.code.encode()), block + body)] if body is not None else ()


def _factors(found: TorchCall) -> list[ast.expr]:
    """The tensors that a product is made of; none where one may be something else, or is not seen."""
    given, at = list(found.operands), 0
    wanted = 3 if found.name in _SUMMED or found.name in ("bilinear", "scaled_dot_product_attention") else 2
    if found.name == "einsum":
        at, wanted = 1, len(given)
        if not given or not isinstance(given[0], ast.Constant):
            return []
    if found.name in _OF_TWO and len(given) < wanted:
        given = [each for number in (0, 1) if (each := found.operand(number)) is not None]
    may_have = found.name in ("linear", "bilinear", *_CONVOLUTIONS)
    has_bias = "bias" in found.keywords or (may_have and len(given) > wanted)
    factors = given[at:wanted]  # a bias may be None
    return factors if len(factors) == wanted - at and not has_bias and not any(map(is_number, factors)) else []


def _float(statement: Statement, found: TorchCall, place: ast.expr) -> Splice:
    return found.with_operand(statement, place, f"{statement.atom(place)}.float()")


def _may_cast(place: ast.expr) -> bool:
    """Whether an operand is a tensor, as far as it shows, and not in float32 already."""
    cast = as_call(place, "float", "double")
    return cast is None and not is_number(place)


def _tensors(operands: Sequence[ast.expr]) -> Iterator[ast.expr]:
    """Names of tensors in the operands: the operands themselves, or what their methods are called of."""
    for operand in operands:
        tensor = operand
        while isinstance(tensor, ast.Call) and isinstance(tensor.func, ast.Attribute):
            tensor = tensor.func.value
        if dotted(tensor) and is_plain(tensor) and not path_of(tensor):
            yield tensor


def _runs_alone(statement: Statement, found: TorchCall) -> bool:
    """Whether a line can go into a block of its own, and calls nothing else that needs autocast."""
    if statement.before or statement.after or "\n" in statement.code or len(statement.tree.body) != 1:
        return False
    body = statement.tree.body[0]
    if isinstance(body, ast.Assign) and f"{statement.text(body.targets[0])} =" not in statement.code:
        return False  # an argument of a call that the line is a part of
    calls = [node for node in statement.nodes() if isinstance(node, ast.Call) and node is not found.node]
    names = [each.func.attr if isinstance(each.func, ast.Attribute) else dotted(each.func) for each in calls]
    owned = [dotted(each.func.value) for each in calls if isinstance(each.func, ast.Attribute)]
    return isinstance(body, (ast.Assign, ast.Return)) and _FOLLOWING.issuperset(names) and "self" not in owned


#: What functions are given, as float32; all others take one tensor.
_GIVEN = {
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot", "inner", "outer"), "a.float(), b.float()"),
    **dict.fromkeys(("mul", "add", "sub", "div", "true_divide"), "a.float(), b.float()"),
    **dict.fromkeys(("addmm", "addbmm", "baddbmm", "addmv", "addr"), "c.float(), a.float(), b.float()"),
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d"), "x.float(), weight.float(), bias.float()"),
    **dict.fromkeys((f"conv_transpose{n}d" for n in "123"), "x.float(), weight.float(), bias.float()"),
    "bilinear": "a.float(), b.float(), weight.float(), bias.float()",
    "einsum": "equation, a.float(), b.float()",
    "scaled_dot_product_attention": "q.float(), k.float(), v.float()",
    "cross_entropy": "x.float(), target",
    "binary_cross_entropy": "x.float(), target.float()",
    "binary_cross_entropy_with_logits": "x.float(), target.float()",
}
#: What stands in `torch.nn.functional` alone, besides the losses.
_IN_FUNCTIONAL = frozenset(
    {"linear", "bilinear", "normalize", "gelu", "cross_entropy", "scaled_dot_product_attention"}
    | {"binary_cross_entropy", "binary_cross_entropy_with_logits"}
)


def _in_float32(call: str) -> str:
    """A call on float32 operands: ``torch.matmul(a.float(), b.float())``."""
    is_loss = call.endswith("_loss")
    given = "x.float(), target" if is_loss else _GIVEN.get(call, "x.float()")
    rest = "" if is_loss or call in _GIVEN else "  # its other arguments as they are"
    return f"{'F' if is_loss or call in _IN_FUNCTIONAL else 'torch'}.{call}({given}){rest}"


FORMS = (
    CureForm(
        form=Form.IN_FLOAT32,
        tried=lambda asked: f"{asked.call} alone in float32",
        sentence=lambda asked: f"Compute {asked.call} in float32, outside of autocast.",
        code=lambda asked: f"with torch.autocast(device_type, enabled=False):\n    y = {_in_float32(asked.call)}",
        turn=TrialTurn.IN_FLOAT32,
        rules=(of_call,),
        live=(Float32Call,),
        rewriting=_write,
    ),
)
