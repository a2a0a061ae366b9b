"""Files of a few kilobytes that would take gigabytes to read are refused in one line, before they do."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ampscope
from ampscope.errors import RunDamaged
from ampscope.trace.files.layout import list_table, table_folder
from ampscope.trace.read import sealed_parts, small_tables
from ampscope.trace.read.page_headers import chunk_of
from ampscope.trace.read.run import open_run
from ampscope.trace.read.sealed_parts import read_facts, read_part, texts_in
from ampscope.trace.schema import Table, arrow_schema
from tests.support.command import Command
from tests.support.trace_builder import TraceBuilder


def the_part(run: Path, table: Table) -> Path:
    (part,) = list_table(table_folder(run, 0, table)).parts.values()
    return part


def with_columns(part: Path, table: Table, columns: Mapping[str, pa.Array]) -> None:
    """Write a part anew with some columns replaced, dictionaries kept as they are given."""
    rows = pq.read_table(part)
    count = len(next(iter(columns.values())))
    rows = pa.concat_tables([rows.slice(0, 1)] * count)
    for name, values in columns.items():
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(place, pa.field(name, values.type, arrow_schema(table).field(name).nullable), values)
    pq.write_table(rows, part, compression="zstd", store_schema=False)


def repeated(text: str, count: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([text]))


def number(value: int) -> bytes:
    """As Thrift's compact protocol has it, in as few bytes as it takes."""
    value, found = value << 1, bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def told_less(part: Path, **numbers: tuple[int, int]) -> None:
    """Let a footer tell smaller numbers, in as many bytes as before."""
    content = part.read_bytes()
    length = struct.unpack("<I", content[-8:-4])[0]
    body, footer = content[: -8 - length], content[-8 - length : -8]
    for was, now in numbers.values():
        old = number(was)
        new = bytes(now << 1 >> 7 * place & 127 | (128 if place < len(old) - 1 else 0) for place in range(len(old)))
        assert old in footer
        footer = footer.replace(old, new)
    part.write_bytes(body + footer + content[-8:])


@pytest.fixture
def findings(run_folder: Path) -> Path:
    """The run, whose part of findings holds two gigabytes of text in some kilobytes."""
    trace = TraceBuilder(run_folder)
    trace.step()
    trace.finding(evidence="{}")
    part = the_part(trace.close(), Table.FINDINGS)
    with_columns(part, Table.FINDINGS, {"evidence": repeated("x" * 1_000_000, 2000)})
    assert part.stat().st_size < 50_000
    return run_folder


def test_texts_that_expand_are_counted_and_not_decoded(findings: Path) -> None:
    before = pa.total_allocated_bytes()
    with open_run(findings) as run:
        for look in (lambda: run.rows(Table.FINDINGS), lambda: run.findings, lambda: ampscope.diagnose(run)):
            with pytest.raises(RunDamaged, match=r"texts take 2,000,\d{3},\d{3} bytes .* up to 536,870,912 are"):
                look()
        assert len(run.rows(Table.STEPS)) == 1
    assert pa.total_allocated_bytes() - before < 100 << 20


def test_the_command_says_so_in_one_line(
    findings: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = Command(monkeypatch, capsys)("diagnose", findings)
    assert (answer.code, answer.out) == (2, "")
    (line,) = answer.err.splitlines()
    assert "part-000000.parquet cannot be read (its texts take 2,000" in line


def test_many_texts_that_name_short_ones_mostly_are_read(run_folder: Path) -> None:
    """One long text among many rows bounds nothing by itself: what they come to is counted."""
    trace = TraceBuilder(run_folder)
    trace.finding(evidence="{}")
    part = the_part(trace.close(), Table.FINDINGS)
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 1999 + [1], pa.int32()), pa.array(["{}", "x" * 1_000_000]))
    with_columns(part, Table.FINDINGS, {"evidence": texts})
    assert texts_in(part) < 2_000_000
    with open_run(run_folder) as run:
        assert [len(row.evidence) for row in run.rows(Table.FINDINGS)] == [2] * 1999 + [1_000_000]


def test_lists_of_texts_count_too(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = TraceBuilder(run_folder)
    trace.incident(bad_params=("w" * 1000,) * 50)
    part = the_part(trace.close(), Table.INCIDENTS)
    assert 50_000 < texts_in(part) < 100_000
    monkeypatch.setattr(sealed_parts, "MOST_TEXT", 40_000)
    with pytest.raises(RunDamaged, match=r"its texts take 50,\d{3} bytes .* up to 40,000 are read"):
        texts_in(part)


@pytest.fixture
def three_parts(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three parts with one long text and many short ones in each: 3,360 bytes, where the headers allow for 150,000."""
    monkeypatch.setattr(small_tables, "MOST_ROWS", 0)
    monkeypatch.setattr(sealed_parts, "MOST_TEXT_A_ROW", 0)
    for _ in range(3):
        trace = TraceBuilder(run_folder)
        trace.event(text="x" * 1000)
        for _ in range(30):
            trace.event()
        trace.close()
    return run_folder


def test_a_table_has_an_end_of_texts_however_many_parts(three_parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_parts, "MOST_TABLE_TEXT", 3000)
    with (
        open_run(three_parts) as run,
        pytest.raises(RunDamaged, match=r"events cannot be read \(its texts take 3,"),
    ):
        run.rows(Table.EVENTS)


def test_many_parts_that_could_hold_more_than_they_do_are_read(
    three_parts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a job of a thousand ranks: what the headers allow for is no reason to refuse them."""
    monkeypatch.setattr(sealed_parts, "MOST_TABLE_TEXT", 4000)
    with open_run(three_parts) as run:
        assert len(run.rows(Table.EVENTS)) == 93
        assert run.events.collect().shape[0] == 93


# -- pages that are larger than the footer says -----------------------------------------------------------------------


@pytest.fixture
def ops(run_folder: Path) -> Path:
    """A part of ops whose pages hold 40,000 counts, of which the footer tells 20."""
    trace = TraceBuilder(run_folder)
    trace.op()
    part = the_part(trace.close(), Table.OPS)
    counts = pa.array([[number * place for number in range(4000)] for place in range(10)], pa.list_(pa.int64()))
    with_columns(part, Table.OPS, {"exp_counts": counts})
    told_less(part, values=(40_000, 20))
    return run_folder


@pytest.mark.parametrize("most", [0, 1 << 17], ids=["read by the database", "read at once"])
def test_lists_that_are_longer_than_the_footer_says(most: int, ops: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_tables, "MOST_ROWS", most)
    why = r"part-000000\.parquet cannot be read \(pages of its column 'exp_counts.* declare more than its footer\)"
    with open_run(ops) as run:
        for look in (lambda: run.rows(Table.OPS, step=0), lambda: run.ops):
            with pytest.raises(RunDamaged, match=why):
                look()


def test_lists_that_the_footer_tells_too_long(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = TraceBuilder(run_folder)
    trace.op(exp_counts=(0,) * 100_000)
    part = the_part(trace.close(), Table.OPS)
    read_facts(part, Table.OPS)
    monkeypatch.setattr(sealed_parts, "_MOST_BYTES", 500_000)
    with pytest.raises(RunDamaged, match=r"declares \d+,\d{3} bytes of columns; up to 500,000 are read"):
        read_facts(part, Table.OPS)


def test_a_page_of_any_column_is_looked_at_before_a_part_is_loaded(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for step in range(1000):
        trace.step(lr=1 / (step + 1))
    part = the_part(trace.close(), Table.STEPS)
    with part.open("rb") as file:
        group = pq.read_metadata(file).row_group(0)
    (column,) = (
        group.column(place) for place in range(group.num_columns) if group.column(place).path_in_schema == "lr"
    )
    told_less(part, size=(column.total_uncompressed_size, 30))
    with pytest.raises(RunDamaged, match=r"pages of its column 'lr' declare more than its footer"):
        read_part(part)


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(b"", id="none"),
        pytest.param(bytes(64), id="empty"),
        pytest.param(b"\xff" * 64, id="numbers without end"),
        pytest.param(b"\x1c" * 64, id="structures without end"),
        pytest.param(b"\x19\xf8" + b"\xff" * 64, id="a list without end"),
        pytest.param(b"\x15\x00\x15\x01\x15\x00\x2c\x15\x02\x00\x00", id="a size below zero"),
        pytest.param(b"\x15\x00\x15\x02\x15\x02\x00", id="of no kind"),
    ],
)
def test_what_is_no_page_is_named(header: bytes, run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.event(text="x" * 100)
    part = the_part(trace.close(), Table.EVENTS)
    content = part.read_bytes()
    part.write_bytes(content[:4] + header.ljust(64, b"\0") + content[68:])
    with part.open("rb") as file, pytest.raises(ValueError, match=r"page header|pages of its column"):
        chunk_of(file, pq.read_metadata(file).row_group(0).column(0))


@pytest.mark.parametrize("options", [{}, {"data_page_version": "2.0"}, {"compression": "none"}, {"data_page_size": 64}])
def test_what_writers_write_is_read(options: dict[str, Any], run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for step in range(300):
        trace.step(traced="live" * (step % 3))
    part = the_part(trace.close(), Table.STEPS)
    rows = pq.read_table(part)
    pq.write_table(rows, part, write_page_checksum=True, row_group_size=100, **options)
    with part.open("rb") as file:
        footer = pq.read_metadata(file)
        for group in range(footer.num_row_groups):
            columns = [footer.row_group(group).column(place) for place in range(footer.num_columns)]
            assert [chunk_of(file, column).values for column in columns] == [100] * len(columns)
    assert read_part(part).equals(rows)
