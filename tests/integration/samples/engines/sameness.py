"""Whether two results say the same, number by number; where they do not, the first places at which they differ."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

#: Of two floats, the relative difference that the order of a sum may make.
ROUNDING = 1e-12


def differences(one: Any, other: Any, place: str = "") -> Iterator[str]:
    """The places at which two results differ by more than rounding, in words."""
    if type(one) is not type(other):
        yield f"{place}: {type(one).__name__} and {type(other).__name__}"
    elif isinstance(one, float):
        if not (math.isclose(one, other, rel_tol=ROUNDING) or (math.isnan(one) and math.isnan(other))):
            yield f"{place}: {one!r} and {other!r}"
    elif isinstance(one, np.ndarray):
        yield from differences(one.tolist(), other.tolist(), place)
    elif dataclasses.is_dataclass(one) and not isinstance(one, type):
        for field in dataclasses.fields(one):
            yield from differences(getattr(one, field.name), getattr(other, field.name), f"{place}.{field.name}")
    elif isinstance(one, Mapping):
        yield from differences(list(one), list(other), f"{place} keys")
        for key in one.keys() & other.keys():
            yield from differences(one[key], other[key], f"{place}[{key!r}]")
    elif isinstance(one, Set) or not isinstance(one, Sequence) or isinstance(one, str | bytes):
        if one != other:
            yield f"{place}: {one!r} and {other!r}"
    else:
        if len(one) != len(other):
            yield f"{place}: {len(one)} and {len(other)} elements"
        for number, pair in enumerate(zip(one, other, strict=False)):
            yield from differences(*pair, f"{place}[{number}]")
