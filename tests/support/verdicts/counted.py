"""Rows of traces whose exponents were counted, from arrays of values as a training would hold them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampscope.trace.dtypes import FINFO
from ampscope.trace.schema import Node, Phase, Source
from tests.support.trace_builder import TraceBuilder

#: Gradients of ten octaves below 2**-20, without a scale.
SMALL = 2.0**-20 * 2.0 ** -np.linspace(0, 10, 1000)


def statistics_of(values: NDArray[Any], dtype: str = "float32") -> dict[str, Any]:
    """The columns of `OpRow` that full statistics fill, of values that ``dtype`` can hold."""
    sizes = np.abs(np.asarray(values, np.float64)).ravel()
    nonzero = sizes[(sizes > 0) & np.isfinite(sizes)]
    powers = np.frexp(nonzero)[1] - 1
    low = int(powers.min()) if powers.size else None
    return {
        "numel": sizes.size,
        "min": float(np.min(values)),
        "max": float(np.max(values)),
        "zeros": int((sizes == 0).sum()),
        "subnormals": int((nonzero < FINFO[dtype].smallest_normal).sum()),
        "max_finite": float(nonzero.max()) if nonzero.size else 0.0,
        "min_positive": float(nonzero.min()) if nonzero.size else None,
        "posinf": int(np.isposinf(values).sum()),
        "neginf": int(np.isneginf(values).sum()),
        "nan": int(np.isnan(values).sum()),
        "exp_low": low,
        "exp_counts": tuple(np.bincount(powers - low).tolist()) if low is not None else None,
    }


def with_gradient(trace: TraceBuilder, values: NDArray[Any], *, scale: float = 1.0, name: str = "fc.weight") -> None:
    """A step with one counted gradient that came out of float16, and the cast that says so."""
    module = name.rpartition(".")[0]
    cast = trace.site(
        "aten._to_copy.default",
        module=module,
        phase=Phase.BACKWARD,
        in_dtypes=("float16",),
        out_dtypes=("float32",),
        cast="autocast",
    )
    node = trace.site(Node.GRADIENT, name=name, module=module, phase="", in_dtypes=(), out_dtypes=("float32",))
    trace.param(name)
    step = trace.step(scale=scale, traced=Source.LIVE).step
    given = statistics_of(values)
    trace.op(cast, step=step, source=Source.LIVE, **given)
    trace.op(node, step=step, source=Source.LIVE, **given)
