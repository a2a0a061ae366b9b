"""One call in float32, where what comes of it still fits what reads it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from ampscope import provenance
from ampscope.capture.keep_fp32.keeping import in_float32
from ampscope.capture.replay.cures.forms.call_form import Call, CallForm
from ampscope.capture.replay.cures.forms.failed_call import FailedCall
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
