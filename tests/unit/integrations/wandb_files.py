"""Reads what Weights & Biases writes offline: its records, in the blocks of a LevelDB log."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _FILE_HEADER, _HEADER = 32 << 10, 7, struct.Struct("<IHB")
_FULL, _FIRST, _LAST = 1, 2, 4


def records(file: Path) -> Iterator[Any]:
    """The records of one ``.wandb`` file, in order."""
    from wandb.proto import wandb_internal_pb2

    make: Any = wandb_internal_pb2.__dict__["Record"]  # made at run time

    whole = b""
    for kind, piece in _pieces(file.read_bytes()):
        whole = piece if kind in (_FULL, _FIRST) else whole + piece
        if kind in (_FULL, _LAST):
            record = make()
            record.ParseFromString(whole)
            yield record


def _pieces(data: bytes) -> Iterator[tuple[int, bytes]]:
    assert data[:4] == b":W&B"
    at = _FILE_HEADER
    while at + _HEADER.size <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER.size:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = _HEADER.unpack_from(data, at)
        yield kind, data[at + _HEADER.size : at + _HEADER.size + length]
        at += _HEADER.size + length
