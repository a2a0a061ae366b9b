"""Injures copies of a run, the same injury for the same number: in its bytes, its tables' structure or its manifest."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ampscope.trace.schema import MANIFEST

Injury = Callable[[Random, Path], str]

_NOT_TEXT = [
    "",
    "\x00",
    "\x1b[2J",
    "<script>",
    "../..",
    "null",
    "[]",
    "{}",
    '{"params": null}',
    '{"rows": [[[]]]}',
    "NaN",
]
_NOT_JSON = [
    "[" * 5000,
    '{"ops": [{"seq": "x"}], "lost": 3, "state": [], "still": 1}',
    "1e999",
    "replay",
    "aten.mm.default",
]
_OF_TYPE: dict[str, list[Any]] = {
    "string": [*_NOT_TEXT, *_NOT_JSON, "a" * 10_000, "float16", "8x8", "-1x", "9" * 400],
    "double": [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e308, 5e-324],
    "float": [math.nan, math.inf, -math.inf, -1.0, 0.0, 3e38],
    "int64": [0, -1, 2**63 - 1, -(2**63), 10**9],
    "int32": [0, -1, 2**31 - 1, -(2**31)],
    "int16": [0, -1, 2**15 - 1, -(2**15)],
    "bool": [True, False],
}
_TYPES = [pa.string(), pa.int64(), pa.float64(), pa.bool_(), pa.binary(), pa.list_(pa.int64()), pa.int8(), pa.date32()]
_IN_MANIFEST: list[Any] = [
    None,
    -1,
    0,
    math.inf,
    math.nan,
    "x",
    [],
    {},
    [[]],
    True,
    2**70,
    10**400,
    "\ud800",
    {"a": {"b": []}},
]
_SEGMENTS = [[None], ["x"], [{"started": 1, "pid": math.inf}], [{"started": math.nan, "pid": 1}], [{"started": "1"}]]


def injured(source: Path, folder: Path, number: int) -> str:
    """Puts a copy of the run in ``source`` into ``folder``, with injury ``number``, and says which."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    random = Random(number)
    injury = random.choices(list(_INJURIES), weights=list(_INJURIES.values()))[0]
    return injury(random, folder)


def _bytes(random: Random, run: Path) -> str:
    path = random.choice(sorted(path for path in run.rglob("*") if path.is_file()))
    content = bytearray(path.read_bytes() or b"\x00")
    place, end = random.randrange(len(content)), len(content)
    kind = random.choice(["flip", "cut", "zeros", "twice", "foot", "more"])
    if kind == "flip":
        content[place] ^= 1 << random.randrange(8)
    elif kind == "cut":
        del content[place:]
    elif kind == "zeros":
        content[place : place + 100] = bytes(min(100, end - place))
    elif kind == "twice":
        content[place:place] = content[place : place + 100]
    elif kind == "foot":
        content[random.randrange(max(0, end - 2000), end)] = random.randrange(256)
    else:
        content += random.randbytes(50)
    path.write_bytes(content)
    return f"{kind} at {place} of {path.relative_to(run)}"


def _manifest(random: Random, run: Path) -> str:
    data = json.loads((run / MANIFEST).read_text())
    key = random.choice([*data, "closed", "segments"])
    data[key] = random.choice(_SEGMENTS if key == "segments" else _IN_MANIFEST)
    (run / MANIFEST).write_text(json.dumps(data))
    return f"{key} = {str(data[key])[:40]}"


def _column(random: Random, run: Path) -> str:
    part = _part(random, run)
    rows = _read(part)
    place = random.randrange(rows.num_columns)
    field = rows.schema.field(place)
    kind = random.choice(["lost", "nulls", "type", "some", "some", "all", "all", "mixed"])
    if kind == "lost":
        rows = rows.remove_column(place)
    elif kind == "nulls":
        nullable = random.choice([field, field.with_nullable(True)])
        values = pa.array([None] * rows.num_rows if nullable.nullable else rows[place].to_pylist(), field.type)
        rows = rows.set_column(place, nullable, values)
    elif kind == "type":
        other = random.choice(_TYPES)
        rows = rows.set_column(place, pa.field(field.name, other, nullable=True), pa.nulls(rows.num_rows, other))
    else:
        rows = rows.set_column(
            place, field, pa.array(_values(random, kind, rows[place].to_pylist(), field), field.type)
        )
    pq.write_table(rows, part)
    return f"{kind} {part.parent.name}.{field.name}"


def _values(random: Random, kind: str, values: list[Any], field: pa.Field) -> list[Any]:
    if kind == "mixed":
        return random.sample(values, len(values))
    others = _of_list(random, field.type) if pa.types.is_list(field.type) else _OF_TYPE[str(field.type)]
    others = [*others, None] if field.nullable else others
    if kind == "all":
        return [random.choice(others)] * len(values)
    return [random.choice(others) if random.random() < 0.3 else value for value in values]


def _of_list(random: Random, kind: pa.DataType) -> list[Any]:
    one = random.choice(_OF_TYPE[str(kind.value_type)])
    return [[], [one], [one] * 20, [None]]


def _rows(random: Random, run: Path) -> str:
    part = _part(random, run)
    rows = _read(part)
    kind = random.choice(["twice", "none", "shuffled", "more", "other"])
    if kind == "twice":
        rows = pa.concat_tables([rows, rows])
    elif kind == "none":
        rows = rows.slice(0, 0)
    elif kind == "shuffled":
        rows = rows.take(random.sample(range(rows.num_rows), rows.num_rows))
    elif kind == "more":
        rows = rows.append_column(random.choice(["mood", "filename", "rank", "STEP"]), pa.array(["x"] * rows.num_rows))
    else:
        rows = _read(_part(random, run))
    pq.write_table(rows, part)
    return f"{kind} {part.parent.name}"


def _journal(random: Random, run: Path) -> str:
    said = _column(random, run)
    part = _part(random, run)
    rows = _read(part)
    messages = [rows.schema.serialize(), *(batch.serialize() for batch in rows.to_batches())]
    content = b"".join(message.to_pybytes() for message in messages)
    keep = random.choice([len(content), random.randrange(len(content))])
    part.unlink()
    part.with_name("journal-000000.arrow").write_bytes(content[:keep])
    return f"{said}; {keep} bytes of {part.parent.name} as a journal"


def _folder(random: Random, run: Path) -> str:
    folder = _part(random, run).parent
    kind = random.choice(["gone", "file", "rank", "loop"])
    if kind in {"gone", "file"}:
        shutil.rmtree(folder)
    if kind == "file":
        folder.write_text("no folder")
    elif kind == "rank":
        shutil.copytree(folder.parent, run / random.choice(["rank=7", "rank=99999999999999", "rank=-1"]))
    elif kind == "loop":
        (run / "rank=1").symlink_to(random.choice([str(run), "rank=1", str(folder)]))
    return f"{kind} {folder.name}"


def _part(random: Random, run: Path) -> Path:
    return random.choice(sorted(run.glob("rank=0/*/part-*.parquet")))


def _read(part: Path) -> pa.Table:
    with pq.ParquetFile(part) as file:
        return file.read()


_INJURIES: dict[Injury, int] = {_bytes: 3, _manifest: 2, _column: 8, _rows: 2, _journal: 2, _folder: 1}
