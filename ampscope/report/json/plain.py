"""A result as JSON: the object that a verb prints with ``--json``."""

from __future__ import annotations

import dataclasses
import json
import math
from enum import Enum
from typing import Any

from ampscope.analysis.results import CodeLine, Operand


def as_json(result: Any) -> str:
    """A result of analysis as a JSON object; its keys are the fields of its type, always in the same order.

    JSON has no NaN and no infinities: they become the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which
    Python's ``float`` and JavaScript's ``Number`` both read back. `ampscope.report.json.schema` tells this to others.
    """
    return json.dumps(as_plain(result), indent=2, allow_nan=False)


def as_plain(value: Any) -> Any:
    """A result as dictionaries, lists, strings and finite numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: as_plain(each) for name, each in _fields(value).items()}
    if isinstance(value, dict):
        return {str(key): as_plain(value[key]) for key in sorted(value)}
    if isinstance(value, CodeLine):
        return str(value)
    if isinstance(value, (tuple, list)):
        return [as_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return _number(value) if isinstance(value, float) else value


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name; the statistics of an operand stand among its own facts."""
    if not isinstance(value, Operand):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    own = {"role": value.role, "dtype": value.dtype, "shape": value.shape}
    first = {"min": value.statistics.min, "max": value.statistics.max, "numel": value.numel}
    return own | first | value.statistics._asdict() | {"exp_counts": value.exp_counts}


def _number(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value
