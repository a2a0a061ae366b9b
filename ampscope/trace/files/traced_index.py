"""Keeps in the footer of a part of ``ops`` which traced steps it holds, so that nobody has to count its rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ampscope.trace.files.arrow_arrays import numbers_in

#: The name of the index among what a footer tells.
KEY = "ampscope.traced"
#: Steps that an index tells of; a part with more of them has none, and its rows are counted.
MOST_STEPS = 2000


class StepRows(NamedTuple):
    """How many rows of one execution of a step there are."""

    step: int
    source: str  #: a `Source`, or one with the number of its optimizer
    rows: int


def index_of(rows: pa.Table) -> str:
    """The index of rows of ``ops``, as JSON; empty where they are of too many steps."""
    steps, sources = numbers_in(rows["step"]), rows["source"].combine_chunks()
    encoded = sources.dictionary_encode() if isinstance(sources, pa.Array) else pa.concat_arrays(sources.chunks)
    names, codes = encoded.dictionary.to_pylist(), numbers_in(pa.chunked_array([encoded.indices]))
    changes = np.flatnonzero((np.diff(steps) != 0) | (np.diff(codes) != 0)) + 1
    if changes.size >= MOST_STEPS:
        return ""
    found: dict[tuple[int, str], int] = {}
    for begin, end in zip([0, *changes.tolist()], [*changes.tolist(), len(steps)], strict=True):
        key = int(steps[begin]), names[int(codes[begin])]
        found[key] = found.get(key, 0) + end - begin
    return json.dumps([[*key, count] for key, count in found.items()], separators=(",", ":"))


def read_index(metadata: Mapping[bytes, bytes] | None, rows: int) -> tuple[StepRows, ...] | None:
    """The index that a footer holds; None where it holds none that fits its rows.

    Args:
        metadata: What the footer tells.
        rows: How many rows it tells of.
    """
    try:
        told = json.loads((metadata or {}).get(KEY.encode(), b"null"))
        found = tuple(_checked(*each) for each in told)
    except (ValueError, TypeError, RecursionError):
        return None
    return found if sum(each.rows for each in found) == rows else None


def _checked(step: Any, source: Any, rows: Any) -> StepRows:
    if type(step) is not int or type(source) is not str or type(rows) is not int or rows < 1:
        raise TypeError("no step, source and number of rows")
    return StepRows(step, source, rows)
