"""A failed op as a script of its own, for a bug report: the same call in the dtype it ran in, and in a wider one.

A trace is someone else's: nothing of it gets into the script but as a literal, a comment or a checked name.
"""

from __future__ import annotations

import base64
import keyword
import math
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from string import Template
from typing import Any

from ampscope.analysis.diagnosis.reproducible import Reproducible
from ampscope.analysis.results import PathNode, RunInfo
from ampscope.errors import RunDamaged
from ampscope.report.safe_text import visible
from ampscope.trace.files.saved_operands import SavedCall, SavedOperands, tensors_only

#: Operands up to this size are written into the script; larger ones go into a file beside it.
EMBEDDED_BYTES = 64 << 10

_HALF = frozenset({"float16", "bfloat16"})
_OP = re.compile(r"([A-Za-z_]\w*)\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)", re.ASCII)
_NAME = re.compile(r"[a-z]\w*", re.ASCII)


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
    """
    try:
        content = tensors_only(content)
        text = _script(run, found, content, data_name)
    except ValueError as error:
        raise RunDamaged(f"{found.saved.path} describes no call of a torch op: {error}") from None
    return ReproScript(text=text, data=None if _fits(content) else content)


def _script(run: RunInfo, found: Reproducible, content: bytes, data_name: str) -> str:
    call = found.saved.call
    wider, title = _WIDER[_is_half(found.saved)]
    return _TEMPLATE.substitute(
        op=_matched(_OP, call.op).string,
        facts="\n".join(_facts(run, found)),
        imports="import base64" if _fits(content) else "from pathlib import Path",
        operator=_operator(call.op),
        device=_device(call.device),
        wider=wider,
        title=title,
        note=_NOTE if _is_lost(found) else "",
        lost=ascii(_lost(found)),
        data=_data(content, data_name),
        arguments=", ".join(_arguments(call)),
        torch=ascii(run.versions.get("torch", "an unknown version")),
    )


def _fits(content: bytes) -> bool:
    return len(content) <= EMBEDDED_BYTES


def _facts(run: RunInfo, found: Reproducible) -> Iterator[str]:
    """What a reader of the report wants to know, as comments."""
    call = found.saved.call
    module = f" in {call.module}" if call.module else ""
    region = f", under autocast to {call.autocast}" if call.autocast else ""
    yield _comment("op", f"{call.op}, {call.phase}{module}, step {call.step}{region}")
    if call.file:
        yield _comment("line", f"{call.file}:{call.line} in {call.function}")
        yield _comment("", call.code)
    told = textwrap.wrap(f"{found.incident.cause}: {found.incident.explanation}", 100)
    yield from (_comment("" if number else "why", line) for number, line in enumerate(told))
    told = textwrap.wrap(_lost(found), 100)
    yield from (_comment("" if number else "lost", line) for number, line in enumerate(told))
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    yield _comment("with", f"{versions}, on {run.device or call.device}")
    for tensor in found.saved.tensors:
        yield _comment(tensor.name, f"{tensor.dtype} {list(tensor.shape)}")


def _is_lost(found: Reproducible) -> bool:
    """Whether the call's operands had lost what it needs before it, so that no dtype makes it finite."""
    return found.incident.lost is not None and found.saved.call.op == found.incident.op


def _lost(found: Reproducible) -> str:
    """Where an operand was lost, and what that means for the call; empty where none was."""
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


def _operator(op: str) -> str:
    """The op overload as an expression; an overload may be called ``from``."""
    library, name, overload = _matched(_OP, op).groups()
    if keyword.iskeyword(library) or keyword.iskeyword(name):
        raise ValueError(f"{op!r} is not the name of an op")
    packet = f"torch.ops.{library}.{name}"
    return f"getattr({packet}, {overload!a})" if keyword.iskeyword(overload) else f"{packet}.{overload}"


def _device(kind: str) -> str:
    name = _matched(_NAME, kind).string
    if name == "cpu":
        return '"cpu"'
    return f'"{name}" if torch.accelerator.is_available() and torch.{name}.is_available() else "cpu"'


def _arguments(call: SavedCall) -> Iterator[str]:
    yield from map(_source, call.args)
    if call.kwargs:  # some are called like keywords of Python
        yield "**{" + ", ".join(f"{name!a}: {_source(value)}" for name, value in call.kwargs.items()) + "}"


def _matched(pattern: re.Pattern[str], name: Any) -> re.Match[str]:
    match = pattern.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ValueError(f"{name!r} is not a name")
    return match


def _is_half(saved: SavedOperands) -> bool:
    """Whether a half dtype takes part: as an operand, or as the dtype that is asked for."""
    asked = set(_dtypes([saved.call.args, list(saved.call.kwargs.values())]))
    return bool(_HALF & (asked | {tensor.dtype for tensor in saved.tensors}))


def _dtypes(argument: Any) -> Iterator[str]:
    if isinstance(argument, list):
        for item in argument:
            yield from _dtypes(item)
    elif isinstance(argument, dict) and isinstance(argument.get("dtype"), str):
        yield argument["dtype"]


def _source(argument: Any) -> str:
    """An argument (see `SavedCall`) as Python source."""
    if isinstance(argument, list):
        return f"[{', '.join(map(_source, argument))}]"
    if isinstance(argument, float):
        return repr(argument) if math.isfinite(argument) else f"float({str(argument)!r})"
    if argument is None or isinstance(argument, (bool, int, str)):
        return ascii(argument)
    if not isinstance(argument, dict) or len(argument) != 1:
        raise ValueError(f"{argument!r} is not an argument")
    ((kind, value),) = argument.items()
    return _named_source(kind, value)


def _named_source(kind: str, value: Any) -> str:
    if kind == "float" and value in {"inf", "-inf", "nan"}:
        return f"float({value!r})"
    name = _matched(_NAME, value).string
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


#: What the second call widens, and its title, by whether a half dtype takes part in the first.
_WIDER = {
    True: ("{torch.float16: torch.float32, torch.bfloat16: torch.float32}", "in float32"),
    False: ("{torch.float32: torch.float64}", "in float64"),
}

_NOTE = """
An operand had lost what the call needs before it, in half precision: from these operands it fails in every dtype. What
to change is upstream, not the dtype of this call.
"""

_TEMPLATE = Template('''\
"""One call of $op that went wrong: as it ran, and $title.

Written by AMPscope from a recorded run; needs torch and safetensors, and nothing else.
$note"""

$facts

$imports

import torch
from safetensors.torch import load

OP = $operator
DEVICE = $device
WIDER = $wider
RECORDED_WITH = $torch
LOST = $lost
DATA = $data


def call(wider):
    """The op on fresh operands, with the dtypes in ``wider`` replaced: operands before it, and results."""

    def dtype(kind):
        return wider.get(kind, kind)

    t = {name: tensor.to(DEVICE, dtype(tensor.dtype)) for name, tensor in load(DATA).items()}
    before = {name: tensor.clone() for name, tensor in t.items()}
    torch.manual_seed(0)
    result = OP($arguments)
    results = [each for each in (result if isinstance(result, (tuple, list)) else [result]) if torch.is_tensor(each)]
    return before, results or list(t.values())


def finite(tensors):
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def tell(name, tensor):
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    values = tensor[tensor.isfinite()].flatten()
    span = f"{values.min().item():.6g} to {values.max().item():.6g}" if len(values) else "no finite value"
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    print(f"  {name:<10} {kind:<28} {span}, {int(tensor.isnan().sum())} nan, {int(tensor.isinf().sum())} inf")


def show(title, wider):
    """Makes the call and prints it; returns whether operands and results are finite, and the results' dtypes."""
    print(title)
    operands, results = call(wider)
    for name, tensor in sorted(operands.items()):
        tell(name, tensor)
    for number, tensor in enumerate(results):
        tell(f"output {number}", tensor)
    kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in results if tensor.is_floating_point()}
    return finite(operands.values()), finite(results), "/".join(sorted(kinds))


def main():
    print(f"$op on {DEVICE}, torch {torch.__version__} (recorded with {RECORDED_WITH})")
    good_operands, good, dtype = show("as it ran", {})
    if good:
        print("Not reproduced: every result is finite here.")
        return
    try:
        _, good_wider, wider = show("$title", WIDER)
    except (RuntimeError, TypeError) as error:
        print(f"  cannot be computed so: {error}")
        print(f"Reproduced: not finite in {dtype}.")
        return
    said = f"finite in {wider}" if good_wider else f"not finite in {wider} either"
    print(f"Reproduced: not finite in {dtype}, {said}{'' if good_operands else '; an operand is not finite itself'}.")
    if LOST and not good_wider:
        print(LOST)


if __name__ == "__main__":
    main()
''')
