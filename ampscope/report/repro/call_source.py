"""A recorded call as Python source: nothing of it is written but literals and checked names.

A script calls what the trace names, so the trace may name only what a training step computes with: torch's own ops on
tensors, none that knows of a file, a process or a library. A text that such an op takes is a word out of its few.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterator
from typing import Any

from ampscope.errors import NothingToReproduce
from ampscope.trace.files.saved_operands import SavedCall

_OP = re.compile(
    r"([A-Za-z_]\w*)\.((?!__)[A-Za-z_]\w*|__i?(?:and|or|xor|lshift|rshift)__)\.([A-Za-z]\w*)",
    re.ASCII,
)
_NAME = re.compile(r"[a-z]\w*", re.ASCII)
#: Libraries of ops that compute, and nothing else but `_ON_FILES`.
_COMPUTING = frozenset({"aten", "prims"})
#: Their ops that read or write a file.
_ON_FILES = frozenset({"from_file", "save"})
#: What a text among the arguments may be: ``mean``, ``floor``, ``tanh``.
_WORD = re.compile(r"[A-Za-z_]{0,32}", re.ASCII)
_KEYWORD = re.compile(r"(?!__)[A-Za-z_]\w*", re.ASCII)
#: torch's names by kind of argument.
_NAMES_OF = {
    "dtype": re.compile(r"bool|(?:bfloat|float|complex|int|uint|bits|qint|quint)\d\w*", re.ASCII),
    "layout": re.compile(r"strided|jagged|_mkldnn|sparse_[a-z]+"),
    "memory_format": re.compile(r"contiguous_format|preserve_format|channels_last(?:_3d)?"),
}


def op_name(op: str) -> str:
    """``op``, if it is the name of an op overload.

    Raises:
        ValueError: It is not; so do all functions of this module about what they are given.
    """
    return _matched(_OP, op).string


def operator_source(op: str) -> str:
    """The op overload as an expression; an overload may be called ``from``.

    Raises:
        NothingToReproduce: It is one that a script from a trace must not call.
    """
    library, name, overload = _matched(_OP, op).groups()
    if keyword.iskeyword(library) or keyword.iskeyword(name):
        raise ValueError(f"{op!r} is not the name of an op")
    if library not in _COMPUTING:
        raise NothingToReproduce(f"no script is made for {op}: a script calls ops of torch itself (aten, prims) alone")
    if name in _ON_FILES:
        raise NothingToReproduce(f"no script is made for {op}: it reads or writes a file, which no step computes with")
    packet = f"torch.ops.{library}.{name}"
    return f"getattr({packet}, {overload!a})" if keyword.iskeyword(overload) else f"{packet}.{overload}"


def device_source(kind: str) -> str:
    """The device of a recorded call where there is one, else the CPU."""
    name = _matched(_NAME, kind).string
    if name == "cpu":
        return '"cpu"'
    return f'"{name}" if torch.accelerator.is_available() and torch.{name}.is_available() else "cpu"'


def argument_sources(call: SavedCall) -> Iterator[str]:
    """The arguments of the call, in order."""
    yield from map(_source, call.args)
    if call.kwargs:  # some are called like keywords of Python
        yield "**{" + ", ".join(f"{_keyword(name)!a}: {_source(value)}" for name, value in call.kwargs.items()) + "}"


def _keyword(name: str) -> str:
    return _matched(_KEYWORD, name).string


def _matched(pattern: re.Pattern[str], name: Any) -> re.Match[str]:
    match = pattern.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ValueError(f"{name!r} is not a name")
    return match


def _source(argument: Any) -> str:
    """An argument (see `SavedCall`) as Python source."""
    if isinstance(argument, list):
        return f"[{', '.join(map(_source, argument))}]"
    if isinstance(argument, float):
        return repr(argument) if math.isfinite(argument) else f"float({str(argument)!r})"
    if isinstance(argument, str):
        return ascii(_matched(_WORD, argument).string)
    if argument is None or isinstance(argument, (bool, int)):
        return ascii(argument)
    if not isinstance(argument, dict) or len(argument) != 1:
        raise ValueError(f"{argument!r} is not an argument")
    ((kind, value),) = argument.items()
    return _named_source(kind, value)


def _named_source(kind: str, value: Any) -> str:
    if kind == "float" and value in {"inf", "-inf", "nan"}:
        return f"float({value!r})"
    name = _matched(_NAMES_OF.get(kind, _NAME), value).string
    match kind:
        case "tensor":
            return f't["{name}"]'
        case "dtype":
            return f"dtype(torch.{name})"
        case "device":
            return "DEVICE"
        case "layout" | "memory_format":
            return f"torch.{name}"
        case _:
            raise ValueError(f"{kind!r} is no kind of argument")
