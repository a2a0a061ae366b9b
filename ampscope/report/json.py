"""A result as JSON, as a verb prints it with ``--json``, and the JSON Schema of its type."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Mapping
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from ampscope.analysis.results import CodeLine, Operand
from ampscope.trace.schema import Statistics
from ampscope.trace.schema.tables import field_comments


def as_json(result: Any) -> str:
    """A result of analysis as a JSON object; its keys are the fields of its type, always in the same order.

    JSON has no NaN and no infinities: they become the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which
    Python's ``float`` and JavaScript's ``Number`` both read back. `ampscope.report.json` tells this to others.
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


DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NUMBER = "number_or_nonfinite"
_SIMPLE: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    bool: {"type": "boolean"},
    float: {"$ref": f"#/$defs/{_NUMBER}"},
    CodeLine: {"type": "string", "description": "file:line code"},
    type(None): {"type": "null"},
    Any: {},
}
_NUMBERS = {
    "description": "JSON has no NaN and no infinities; they are strings.",
    "anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}],
}


def schema_of(result: type) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of what `ampscope.report.json.as_json` makes of a ``result``.

    Every key is always there; descriptions are those of the types.

    Args:
        result: The type of a result: a dataclass of dataclasses, enums, tuples, dictionaries and plain values.

    Raises:
        TypeError: it has a field of another type.
    """
    definitions: dict[str, Any] = {_NUMBER: _NUMBERS}
    reference = _schema(result, definitions)
    return {"$schema": DIALECT, "title": result.__name__, **reference, "$defs": dict(sorted(definitions.items()))}


def _schema(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return {"anyOf": [_schema(each, definitions) for each in arguments]}
    if origin is tuple:
        return _array(arguments, definitions)
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _schema(arguments[1], definitions)}
    if inspect.isclass(hint) and issubclass(hint, Enum):
        definitions[hint.__name__] = {"description": _first_line(hint), "enum": [each.value for each in hint]}
    elif inspect.isclass(hint) and dataclasses.is_dataclass(hint):
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = {}  # a type may hold others of its own kind
            definitions[hint.__name__] = _object(hint, definitions)
    else:
        raise TypeError(f"{hint!r} has no JSON Schema here: give it one beside ampscope.report.json.as_plain")
    return {"$ref": f"#/$defs/{hint.__name__}"}


def _array(items: tuple[Any, ...], definitions: dict[str, Any]) -> dict[str, Any]:
    if len(items) == 2 and items[1] is Ellipsis:
        return {"type": "array", "items": _schema(items[0], definitions)}
    each = [_schema(item, definitions) for item in items]
    return {"type": "array", "prefixItems": each, "minItems": len(each), "maxItems": len(each)}


def _object(result: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """A dataclass; of an operand its statistics stand among its own facts, as ``as_plain`` puts them."""
    types, told = get_type_hints(result), _descriptions(result)
    if result is Operand:
        types.pop("statistics")
        types |= get_type_hints(Statistics) | {"exp_counts": tuple[int, ...]}
        told |= _descriptions(Statistics)
    properties = {
        name: _schema(hint, definitions) | ({"description": told[name]} if name in told else {})
        for name, hint in types.items()
        if not name.startswith("_")
    }
    return {
        "type": "object",
        "description": _first_line(result),
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _first_line(described: Any) -> str:
    return (inspect.getdoc(described) or "").partition("\n")[0]


def _descriptions(described: type) -> dict[str, str]:
    """Returns the descriptions of the fields of a class and its bases, from the comments behind them."""
    told: dict[str, str] = {}
    for each in reversed(described.__mro__):
        if dataclasses.is_dataclass(each) or each is described:
            told |= field_comments(each)
    return {name: text.replace("``", "`") for name, text in told.items() if text}
