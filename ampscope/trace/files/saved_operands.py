"""Operands kept with a run, ``RUN/rank=K/tensors/step=N-seq=M.safetensors``: a failed op's call, to be made again.

The file is plain safetensors; its metadata holds a `SavedCall` as JSON. Reading it needs no torch and runs no code.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ampscope.errors import RunDamaged
from ampscope.trace.files.layout import rank_folder, ranks
from ampscope.trace.files.whole_files import open_regular, read_regular

FOLDER = "tensors"
#: The key of safetensors' metadata under which the call is found.
KEY = "ampscope.call"

_NAME = re.compile(r"step=(\d+)-seq=(\d+)\.safetensors")
#: What safetensors calls a dtype, its name in torch, and bytes per element.
_DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "I16": ("int16", 2),
    "I32": ("int32", 4),
    "I64": ("int64", 8),
    "U16": ("uint16", 2),
    "U32": ("uint32", 4),
    "U64": ("uint64", 8),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
}
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 16 << 20
#: A call's operands take 64 MiB at most when they are kept.
_MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCall:
    """A call of an op.

    Arguments are JSON: null, a bool, int, float or string as it is, a list of arguments, or an object with one key:
    ``tensor`` (a name in the file), ``float`` (``inf``, ``-inf``, ``nan``), ``dtype``, ``device``, ``layout`` or
    ``memory_format`` (torch's name for it, without ``torch.``).
    """

    step: int
    optimizer: int
    seq: int  #: as in the ``ops`` table
    source: str  #: the execution of the step: `ampscope.trace.schema.Source`
    op: str  #: ATen overload
    module: str
    phase: str
    file: str
    line: int
    function: str
    code: str
    autocast: str
    device: str  #: type of the device it ran on
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor in a file of operands."""

    name: str
    dtype: str  #: ``float16``
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedOperands:
    """A file of operands: the call and its tensors, which stay on the disk."""

    path: Path
    call: SavedCall
    tensors: tuple[SavedTensor, ...]

    def content(self) -> bytes:
        """The whole file.

        Raises:
            RunDamaged: it cannot be read.
        """
        try:
            return read_regular(self.path, _MOST_BYTES)
        except OSError as error:
            raise RunDamaged(f"{self.path} cannot be read: {error.strerror or error}") from None


def operands_path(run: Path, rank: int, step: int, seq: int) -> Path:
    """Returns the file in which the operands of an executed op are kept."""
    return rank_folder(run, rank) / FOLDER / f"step={step:06d}-seq={seq:06d}.safetensors"


def operand_files(run: Path, rank: int | None = None) -> list[Path]:
    """The files of operands that a run holds, or one rank of it, by rank, step and execution order."""
    folders = [rank_folder(run, each) / FOLDER for each in (ranks(run) if rank is None else (rank,))]
    numbered = [(index, path) for index, folder in enumerate(folders) if folder.is_dir() for path in folder.iterdir()]
    matched = [(index, match, path) for index, path in numbered if (match := _NAME.fullmatch(path.name))]
    return [path for _, _, path in sorted(matched, key=lambda one: (one[0], int(one[1][1]), int(one[1][2])))]


def as_metadata(call: SavedCall) -> dict[str, str]:
    """Returns the call as metadata for safetensors, kept beside the tensors."""
    return {KEY: json.dumps(asdict(call), allow_nan=False)}


def read_operands(path: Path) -> SavedOperands:
    """Reads the head of a file of operands.

    Raises:
        RunDamaged: it cannot be read, or does not hold what it says.
    """
    try:
        return _parsed(path, *_head(path))
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
        said = f"{type(error).__name__}: {error}"
        raise RunDamaged(
            f"{path} is not a whole file of operands ({said}); the rest of the run is not touched"
        ) from None


def tensors_only(content: bytes) -> bytes:
    """The safetensors in a file of operands without the call: names and lines of the user's program stay behind."""
    end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    header = {name: entry for name, entry in json.loads(content[_LENGTH_BYTES:end]).items() if name != "__metadata__"}
    told = json.dumps(header, separators=(",", ":")).encode()
    told += b" " * (-len(told) % _LENGTH_BYTES)
    return len(told).to_bytes(_LENGTH_BYTES, "little") + told + content[end:]


def _head(path: Path) -> tuple[dict[str, Any], int]:
    """The header, and how many bytes of tensors follow it."""
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > min(_MOST_HEADER_BYTES, size - _LENGTH_BYTES):
            raise ValueError("its header is longer than the file")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise TypeError("its header is no JSON object")
    return header, size - _LENGTH_BYTES - length


def _parsed(path: Path, header: dict[str, Any], size: int) -> SavedOperands:
    call = _call(json.loads(header.pop("__metadata__")[KEY]))
    tensors = [_tensor(name, entry, size) for name, entry in header.items()]
    missing = _names([call.args, call.kwargs]) - {tensor.name for tensor in tensors}
    if missing:
        raise ValueError(f"the tensor {min(missing)!r} is missing")
    return SavedOperands(path=path, call=call, tensors=tuple(sorted(tensors, key=lambda tensor: tensor.name)))


def _tensor(name: str, entry: dict[str, Any], size: int) -> SavedTensor:
    dtype, width = _DTYPES[entry["dtype"]]
    shape = tuple(map(int, entry["shape"]))
    start, end = map(int, entry["data_offsets"])
    if not 0 <= start <= end <= size or end - start != math.prod(shape) * width:
        raise ValueError(f"the tensor {name!r} is cut off")
    return SavedTensor(name=name, dtype=dtype, shape=shape)


_PLAIN: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "list[Any]": lambda value: isinstance(value, list),
    "dict[str, Any]": lambda value: isinstance(value, dict),
}


def _call(told: dict[str, Any]) -> SavedCall:
    known = {each.name: str(each.type) for each in fields(SavedCall)}
    wrong = [name for name, kind in known.items() if not _PLAIN[kind](told[name])]
    if wrong:
        raise ValueError(f"{wrong[0]!r} of the call is of the wrong type")
    return SavedCall(**{name: told[name] for name in known})


def _names(argument: Any) -> set[str]:
    """The tensors that an argument refers to."""
    if isinstance(argument, list):
        return set().union(*map(_names, argument))
    if isinstance(argument, dict):
        if set(argument) == {"tensor"} and isinstance(argument["tensor"], str):
            return {argument["tensor"]}
        return _names(list(argument.values()))
    return set()
