"""A failed op becomes a script of its own, for a bug report: its recorded call as Python source.

A script calls what the trace names, so the trace may name only what a training step computes with: torch's own ops on
tensors, none that knows of a file, a process or a library. A text that such an op takes is a word out of its few.

The script runs the call in the dtype it ran in, and in a wider one. A trace is someone else's: nothing of it gets into
the script but as a literal, a comment or a checked name.
"""

from __future__ import annotations

import base64
import keyword
import math
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from string import Template
from typing import Any

from ampscope.analysis.replay.reproducible import Reproducible
from ampscope.analysis.results import PathNode, RunInfo
from ampscope.analysis.words import where_ranked
from ampscope.errors import NothingToReproduce, RunDamaged
from ampscope.report.safe_text import visible
from ampscope.trace.dtypes import HALF_DTYPES
from ampscope.trace.files.saved_operands import SavedCall, SavedOperands, tensors_only

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


#: Operands up to this size are written into the script; larger ones go into a file beside it.
EMBEDDED_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproScript:
    """A script, and the safetensors that must lie beside it."""

    text: str
    data: bytes | None  #: None where the script holds its operands itself


def as_script(
    run: RunInfo, found: Reproducible, content: bytes, *, data_name: str = "repro.safetensors"
) -> ReproScript:
    """Writes the script.

    Args:
        run: The run, for its versions.
        found: The incident and the call that shows it.
        content: The file of the call's operands.
        data_name: What the file beside the script will be called, should there be one.

    Raises:
        RunDamaged: The call is none that torch could have made.
        NothingToReproduce: Its op is not one that a script may call.
    """
    try:
        content = tensors_only(content)
        text = _script(run, found, content, data_name)
    except (ValueError, RecursionError) as error:
        raise RunDamaged(f"{found.saved.path} describes no call of a torch op: {error}") from None
    return ReproScript(text=text, data=None if _fits(content) else content)


def _script(run: RunInfo, found: Reproducible, content: bytes, data_name: str) -> str:
    call = found.saved.call
    wider, title = _WIDER[_is_half(found.saved)]
    return _template().substitute(
        op=op_name(call.op),
        facts="\n".join(_facts(run, found)),
        imports="import base64" if _fits(content) else "from pathlib import Path",
        operator=operator_source(call.op),
        device=device_source(call.device),
        wider=wider,
        title=title,
        note=_NOTE if _is_lost(found) else "",
        lost=ascii(_lost(found)),
        data=_data(content, data_name),
        arguments=", ".join(argument_sources(call)),
        torch=ascii(run.versions.get("torch", "an unknown version")),
    )


def _fits(content: bytes) -> bool:
    return len(content) <= EMBEDDED_BYTES


def _facts(run: RunInfo, found: Reproducible) -> Iterator[str]:
    call = found.saved.call
    module = f" in {call.module}" if call.module else ""
    region = f", under autocast to {call.autocast}" if call.autocast else ""
    ranked = f" {where}" if (where := where_ranked(found.incident)) else ""
    yield _comment("op", f"{call.op}, {call.phase}{module}, step {call.step}{ranked}{region}")
    if call.file:
        yield _comment("line", f"{call.file}:{call.line} in {call.function}")
        yield _comment("", call.code)
    lines = textwrap.wrap(f"{found.incident.cause}: {found.incident.explanation}", 100)
    yield from (_comment("" if number else "why", line) for number, line in enumerate(lines))
    lines = textwrap.wrap(_lost(found), 100)
    yield from (_comment("" if number else "lost", line) for number, line in enumerate(lines))
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    yield _comment("with", f"{versions}, on {run.device or call.device}")
    for tensor in found.saved.tensors:
        yield _comment(tensor.name, f"{tensor.dtype} {list(tensor.shape)}")


def _is_lost(found: Reproducible) -> bool:
    """Whether the call's operands had lost what it needs before it, so that no dtype makes it finite."""
    return found.incident.lost is not None and found.saved.call.op == found.incident.op


def _lost(found: Reproducible) -> str:
    """Says where an operand was lost, and what that means for the call; empty where none was."""
    lost = found.incident.lost
    if lost is None or not _is_lost(found):
        return ""
    line = f" at {lost.source.file}:{lost.source.line}" if lost.source is not None else ""
    elsewhere = " (in float32 from the start, the step is finite)" if found.incident.fp32_ok else ""
    return (
        f"{_became(lost)} before this call, in {lost.dtype} by {lost.op}{line}: "
        f"from these operands the call fails in every dtype{elsewhere}, and what to change is there."
    )


def _became(lost: PathNode) -> str:
    ends = [end for end in (lost.min, lost.max) if end is not None]
    if 0 in ends:
        return "An operand had already become 0"
    if any(math.isinf(end) for end in ends):
        return "An operand had already become infinite"
    return "An operand had already been rounded"


def _comment(name: str, text: str) -> str:
    said = f"# {name:<5} {text}".rstrip()
    return visible(said).encode("ascii", "backslashreplace").decode("ascii")


def _data(content: bytes, data_name: str) -> str:
    if not _fits(content):
        return f"Path(__file__).with_name({data_name!a}).read_bytes()"
    lines = textwrap.wrap(base64.b64encode(content).decode("ascii"), 100)
    return "\n".join(["base64.b64decode(", *(f'    "{line}"' for line in lines), ")"])


def _is_half(saved: SavedOperands) -> bool:
    """Whether a half dtype takes part: as an operand, or as the dtype that is asked for."""
    asked = set(_dtypes([saved.call.args, list(saved.call.kwargs.values())]))
    return bool(HALF_DTYPES & (asked | {tensor.dtype for tensor in saved.tensors}))


def _dtypes(argument: Any) -> Iterator[str]:
    if isinstance(argument, list):
        for item in argument:
            yield from _dtypes(item)
    elif isinstance(argument, dict) and isinstance(argument.get("dtype"), str):
        yield argument["dtype"]


#: What the second call widens, and its title, by whether a half dtype takes part in the first.
_WIDER = {
    True: ("{torch.float16: torch.float32, torch.bfloat16: torch.float32}", "in float32"),
    False: ("{torch.float32: torch.float64}", "in float64"),
}

_NOTE = """
An operand had lost what the call needs before it, in half precision: from these operands it fails in every dtype. What
to change is upstream, not the dtype of this call.
"""


def _template() -> Template:
    return Template(files(__package__).joinpath("repro_template.py.txt").read_text("utf-8"))
