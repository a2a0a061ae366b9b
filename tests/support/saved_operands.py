"""Files of operands, made by hand: the safetensors format is a length, a JSON header and bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ampscope.trace.files.saved_operands import SavedCall, as_metadata, operands_path

MM = SavedCall(
    step=3,
    optimizer=0,
    seq=7,
    source="replay",
    op="aten.mm.default",
    module="blocks.0.attn",
    phase="forward",
    file="train.py",
    line=47,
    function="Attention.forward",
    code="logits = q @ k.T",
    autocast="float16",
    device="cpu",
    args=[{"tensor": "t0"}, {"tensor": "t1"}],
    kwargs={},
)
#: By name: safetensors' dtype, shape and values as bytes.
TENSORS: dict[str, tuple[str, list[int], bytes]] = {
    "t0": ("F16", [2, 1], b"\x00\x7b\x00\x7b"),
    "t1": ("F16", [1, 2], b"\x00\x7b\x00\x7b"),
}


def content(call: SavedCall = MM, tensors: dict[str, tuple[str, list[int], bytes]] | None = None) -> bytes:
    """A file's bytes."""
    header: dict[str, Any] = {"__metadata__": as_metadata(call)}
    data = b""
    for name, (dtype, shape, values) in (TENSORS if tensors is None else tensors).items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    return framed(json.dumps(header).encode()) + data


def framed(header: bytes) -> bytes:
    """A header with its length."""
    return len(header).to_bytes(8, "little") + header


def save(run: Path, whole: bytes | None = None, call: SavedCall = MM, rank: int = 0) -> Path:
    """Puts a file of operands into a run's folder."""
    path = operands_path(run, rank, call.step, call.seq)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content(call) if whole is None else whole)
    return path
