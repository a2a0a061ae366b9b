"""A run with traced steps in which one op's values grow, one's stay, a mask is large on purpose, a gradient scaled."""

from __future__ import annotations

from pathlib import Path

from ampscope.trace.schema import Node, Phase, Source
from tests.support.trace_builder import TraceBuilder

#: Growth of the op in ``blocks.1``, a step.
RATE = 1.02
#: Statistics that the light look of a live step does not take.
UNMEASURED = dict.fromkeys(
    ("nan", "posinf", "neginf", "zeros", "subnormals", "max_finite", "min_positive", "exp_low", "exp_counts")
)


def growing(folder: Path, *, steps: int = 200, every: int = 5) -> TraceBuilder:
    """The open trace; one step in ``every`` is traced, with light statistics."""
    trace = TraceBuilder(folder)
    add = trace.site("aten.add.Tensor", module="blocks.1", code="x = x + self.mlp(x)", line=12)
    wider = trace.site("aten.add.Tensor", module="blocks.1", code="x = x + self.mlp(x)", line=12, out_shapes=("16x8",))
    steady = trace.site("aten.mm.default", module="blocks.0")
    mask = trace.site("aten.full.default", module="", in_dtypes=(), code="mask = full(-65504)", line=3)
    soft = trace.site("aten._softmax.default", module="blocks.0")
    weight = trace.site(Node.PARAMETER, name="fc.weight", in_dtypes=(), out_dtypes=("float32",))
    back = trace.site("aten.mm.default", module="blocks.1", phase=Phase.BACKWARD, grad_fn="MmBackward0")
    counts = trace.site("aten.add.Tensor", out_dtypes=("int64",))
    for step in range(steps):
        trace.step(scale=1024.0, traced=Source.LIVE if step % every == 0 else "")
        if step % every:
            continue
        size = 8.0 * RATE**step
        wobble = 1.0 + 0.01 * (step // every * 7 % 5)
        spans = (
            (weight, -0.5, 0.5 * wobble),
            (mask, -65504.0, 0.0),
            (steady, -3.0, 3.0 * wobble),
            (wider if step % 2 else add, -size, size / 2),
            (soft, 0.0, wobble),
            (counts, 0.0, 9.0),
            (back, -512.0 * wobble, 256.0),
        )
        for site, low, high in spans:
            trace.op(site, step=step, source=Source.LIVE, min=low, max=high, **UNMEASURED)
    return trace
