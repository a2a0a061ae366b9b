"""Rows of traces whose exponents were counted, from arrays of values as a training would hold them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampscope.trace.dtypes import FINFO


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
