"""Kept operands: read back as written, or refused with the file's name."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ampscope.errors import RunDamaged
from ampscope.trace.files.saved_operands import KEY, SavedTensor, operand_files, read_operands, tensors_only
from tests.support.saved_operands import MM, TENSORS, content, framed, save


def test_what_was_written_is_read(tmp_path: Path) -> None:
    call = replace(
        MM, args=[{"tensor": "t1"}, [{"tensor": "t0"}, None, 2, 0.5]], kwargs={"dtype": {"dtype": "float16"}}
    )
    saved = read_operands(save(tmp_path, call=call))
    assert saved.call == call
    shapes = {"t0": (2, 1), "t1": (1, 2)}
    assert saved.tensors == tuple(SavedTensor(name=n, dtype="float16", shape=shape) for n, shape in shapes.items())


def test_files_come_by_rank_step_and_order_of_execution(tmp_path: Path) -> None:
    places = [(1, 0, 5), (0, 2_000_000, 1), (0, 3, 11), (0, 3, 7)]
    paths = [save(tmp_path, call=replace(MM, step=step, seq=seq), rank=rank) for rank, step, seq in places]
    (paths[0].parent / "step=000001-seq=000001.safetensors.tmp").write_bytes(b"half")
    (paths[0].parent / "notes.txt").write_bytes(b"")
    (tmp_path / "rank=2").mkdir()
    assert operand_files(tmp_path) == [paths[3], paths[2], paths[1], paths[0]]


def test_the_tensors_alone_are_safetensors(tmp_path: Path) -> None:
    whole = tensors_only(content())
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    assert list(header) == list(TENSORS)
    assert whole.endswith(b"".join(values for _, _, values in TENSORS.values()))
    assert int.from_bytes(whole[:8], "little") % 8 == 0


def with_call(**changed: Any) -> bytes:
    """A file whose call is not as it should be."""
    told = {name: value for name, value in {**asdict(MM), **changed}.items() if value is not ...}
    header = {"__metadata__": {KEY: json.dumps(told)}}
    return framed(json.dumps(header).encode())


@pytest.mark.parametrize(
    "whole",
    [
        b"",
        b"\x02",
        b"\xff" * 8 + b"{}",
        framed(b"{"),
        framed(b"[]"),
        framed(b"{}"),
        framed(b'{"__metadata__": {}}'),
        framed(b'{"__metadata__": {"ampscope.call": "[1]"}}'),
        framed(b'{"__metadata__": {"ampscope.call": "' + b"[" * 100_000 + b'"}}'),
        content()[:-1],
        content(tensors={"t0": TENSORS["t0"]}),
        content(tensors={**TENSORS, "t2": ("F7", [1], b"1")}),
        content(tensors={**TENSORS, "t2": ("U8", [2], b"1")}),
        content(tensors={**TENSORS, "t2": ("U8", [-1], b"")}),
        with_call(args="all"),
        with_call(args=[], step=True),
        with_call(args=[], op=...),
    ],
)
def test_a_file_that_is_not_whole_is_refused_by_name(tmp_path: Path, whole: bytes) -> None:
    path = save(tmp_path, whole)
    with pytest.raises(RunDamaged, match=path.name) as error:
        read_operands(path)
    assert error.value.__cause__ is None
