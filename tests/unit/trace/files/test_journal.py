from __future__ import annotations

import errno
import os
from pathlib import Path

import pyarrow as pa
import pytest

from ampscope.trace.files.journal import Journal, read_journal, to_batch
from ampscope.trace.schema import EventRow, GradRow, Phase, Table, arrow_schema


def event(step: int) -> EventRow:
    return EventRow(step=step, segment=0, time=1.7e9 + step, kind="note", text=f"step {step}")


def grad(**columns: object) -> GradRow:
    defaults = {"step": 0, "optimizer": 0, "param": 0, "max_abs": 1.0, "nonfinite": False, "underflow": None}
    return GradRow(**{**defaults, **columns})  # type: ignore[arg-type]  # misfits are the point


def write(path: Path, steps: range) -> list[int]:
    """A journal of one-row batches and its size after each."""
    journal = Journal(path, arrow_schema(Table.EVENTS))
    sizes = [journal.size]
    for step in steps:
        journal.append(to_batch(Table.EVENTS, [event(step)]))
        sizes.append(journal.size)
    journal.close()
    return sizes


def test_each_append_is_on_the_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "journal-000000.arrow"
    journal = Journal(path, arrow_schema(Table.EVENTS))
    for step in range(3):
        journal.append(to_batch(Table.EVENTS, [event(step)]))
        assert path.stat().st_size == journal.size
        assert read_journal(path)["step"].to_pylist() == list(range(step + 1))
    assert (journal.rows, journal.batches) == (3, 3)
    journal.close()


def test_torn_at_any_byte_the_whole_batches_are_read(tmp_path: Path) -> None:
    path = tmp_path / "journal-000000.arrow"
    sizes = write(path, range(3))
    for length in range(sizes[-1], -1, -1):
        os.truncate(path, length)
        expected = max(sum(size <= length for size in sizes) - 1, 0)
        assert read_journal(path).num_rows == expected, length


def test_a_tail_of_zeros_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "journal-000000.arrow"
    sizes = write(path, range(3))
    path.write_bytes(path.read_bytes()[: sizes[2]] + bytes(sizes[3] - sizes[2]))
    assert read_journal(path)["step"].to_pylist() == [0, 1]


def test_any_flipped_byte_is_survived(tmp_path: Path) -> None:
    path = tmp_path / "journal-000000.arrow"
    sizes = write(path, range(2))
    with path.open("r+b", buffering=0) as file:
        for position in range(sizes[1], sizes[2]):
            file.seek(position)
            byte = file.read(1)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 0xFF]), position)
            assert read_journal(path).num_rows in {1, 2}
            os.pwrite(file.fileno(), bytes([byte]), position)


def test_an_existing_journal_is_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "journal-000000.arrow", range(1))
    with pytest.raises(FileExistsError):
        write(tmp_path / "journal-000000.arrow", range(1))


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))
    write(tmp_path / "journal-000000.arrow", range(2))
    assert read_journal(tmp_path / "journal-000000.arrow")["step"].to_pylist() == [0, 1]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal-000000.arrow"
    journal = Journal(path, arrow_schema(Table.EVENTS))
    journal.append(to_batch(Table.EVENTS, [event(0)]))
    real = os.write
    answers = iter([7])

    def full(descriptor: int, data: memoryview) -> int:
        room = next(answers, None)
        if room is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:room])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        journal.append(to_batch(Table.EVENTS, [event(1)]))
    journal.close()
    assert read_journal(path)["step"].to_pylist() == [0]


def test_not_a_number_is_not_null() -> None:
    batch = to_batch(Table.GRADS, [grad(max_abs=float("nan")), grad(max_abs=float("inf")), grad(max_abs=None)])
    assert batch["max_abs"].null_count == 1
    assert str(batch["max_abs"][0]) == "nan"
    assert batch["max_abs"][1].as_py() == float("inf")


def test_enumerations_are_written_as_their_text() -> None:
    batch = to_batch(Table.EVENTS, [event(0)._replace(kind=Phase.BACKWARD)])
    assert batch["kind"].to_pylist() == ["backward"]


@pytest.mark.parametrize(
    ("table", "row"),
    [
        (Table.GRADS, grad(step=None)),
        (Table.GRADS, grad(step="one")),
        (Table.GRADS, grad(step=object())),
        (Table.GRADS, grad(param=2**40)),
        (Table.GRADS, grad(step=2**70)),
        (Table.GRADS, event(0)),
        (Table.EVENTS, event(0)._replace(text="\udcff")),
    ],
)
def test_a_row_that_does_not_fit_is_refused(table: Table, row: GradRow | EventRow) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError)):
        to_batch(table, [row])


def test_an_unreadable_schema_gives_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "journal-000000.arrow"
    path.write_bytes(b"not an arrow stream at all, but long enough to look at")
    assert read_journal(path).num_rows == 0
    assert isinstance(read_journal(path), pa.Table)


def test_a_compressed_batch_is_none_of_a_writers(tmp_path: Path) -> None:
    path = tmp_path / "journal-000000.arrow"
    batch = to_batch(Table.EVENTS, [EventRow(step, 0, 0.0, "note", "x" * 1000) for step in range(1000)])
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(path, batch.schema, options=options) as stream:
        stream.write_batch(batch)
    assert path.stat().st_size < batch.nbytes / 50
    with pytest.raises(OSError, match="compressed"):
        read_journal(path)
    with pa.ipc.new_stream(path, batch.schema) as stream:
        stream.write_batch(batch)
    assert read_journal(path).num_rows == 1000
