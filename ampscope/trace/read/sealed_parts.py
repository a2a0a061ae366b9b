"""One sealed part of a table: what its footer tells, checked before anything else is read of it.

A trace may be damaged or a stranger's. What holds for every row is settled here, from the footer alone: the columns are
there, are of their types and hold no null where none may be, and there are no more rows than a part has.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from ampscope.errors import RunDamaged
from ampscope.trace.files.regular_file import open_regular
from ampscope.trace.files.traced_index import StepRows, read_index
from ampscope.trace.read.column_check import wrong_with
from ampscope.trace.read.part_sizes import refuse_too_much, text_bytes
from ampscope.trace.schema import Table

#: Rows that are read sooner by several threads.
_MANY_ROWS = 1 << 16


class Facts(NamedTuple):
    """Holds the facts in a sealed part's footer; null steps where it tells none."""

    columns: tuple[str, ...]
    rows: int
    first_step: int | None
    last_step: int | None
    traced: tuple[StepRows, ...] | None = None  #: of ops, what was traced; null where the footer does not tell

    def may_hold(self, steps: Sequence[int] | None) -> bool:
        """Whether rows of one of these steps, which ascend, can be in the part; None for those of any."""
        if steps is None or self.first_step is None or self.last_step is None:
            return True
        place = bisect_left(steps, self.first_step)
        return place < len(steps) and steps[place] <= self.last_step


def read_facts(part: Path, table: Table, texts: dict[Path, int] | None = None) -> Facts:
    """Reads the footer of a part.

    Args:
        part: The part.
        table: Its table.
        texts: Where given, takes what `texts_in` says of the part: two looks at a file that is opened once.

    Raises:
        FileNotFoundError: the part has been deleted since it was listed.
        RunDamaged: it cannot be read, or is no part of that table.
    """
    with naming(part), open_regular(part) as file:
        footer = pq.read_metadata(file)
        facts = _facts_in(footer, file.seek(0, 2), table, part)
        if texts is not None:
            texts[part] = text_bytes(file, footer, part)
    return facts


def _facts_in(footer: pq.FileMetaData, size: int, table: Table, part: Path) -> Facts:
    schema = footer.schema.to_arrow_schema()
    bounds = list(_step_bounds(footer))
    if why := wrong_with(table, schema):
        raise unreadable(part, why)
    refuse_too_much(footer, size, table, part)
    columns, rows = tuple(schema.names), footer.num_rows
    traced = read_index(footer.metadata, rows) if table is Table.OPS else None
    if not bounds or None in bounds:
        return Facts(columns, rows, None, None, traced)
    return Facts(columns, rows, min(low for low, _ in bounds), max(high for _, high in bounds), traced)


def texts_in(part: Path) -> int:
    """Bytes that a part's texts take at most once they are decoded.

    Raises:
        FileNotFoundError: the part has been deleted since it was listed.
        RunDamaged: they are too many, or pages of texts or lists are larger than the footer says.
    """
    with naming(part), open_regular(part) as file:
        return text_bytes(file, pq.read_metadata(file), part)


def read_part(part: Path) -> pa.Table:
    """All columns of a part.

    Raises:
        FileNotFoundError: the part has been deleted since it was listed.
        RunDamaged: it cannot be read.
    """
    with naming(part), open_regular(part) as opened, pq.ParquetFile(opened) as file:
        return _read(opened, file, part, file.schema_arrow.names)


def read_columns(part: Path, table: Table, columns: Collection[str]) -> tuple[Facts, pa.Table]:
    """Reads a part's footer and some of its columns, opening it once; columns that it does not have are left out.

    Raises:
        FileNotFoundError: the part has been deleted since it was listed.
        RunDamaged: it cannot be read, or is no part of that table.
    """
    with naming(part), open_regular(part) as opened, pq.ParquetFile(opened) as file:
        facts = _facts_in(file.metadata, opened.seek(0, 2), table, part)
        return facts, _read(opened, file, part, [name for name in facts.columns if name in columns])


def _read(opened: BinaryIO, file: pq.ParquetFile, part: Path, columns: list[str]) -> pa.Table:
    text_bytes(opened, file.metadata, part, loaded=columns)
    rows = file.read(columns, use_threads=file.metadata.num_rows > _MANY_ROWS)
    rows.validate(full=True)
    return rows


def bound(connection: duckdb.DuckDBPyConnection, parts: list[str]) -> duckdb.DuckDBPyRelation:
    """Parts as a relation, with the name of the file of each row.

    Raises:
        duckdb.Error: one of them has been deleted since it was listed.
        RunDamaged: they are there, and cannot be read.
    """
    try:
        return connection.read_parquet(parts, hive_partitioning=False, filename=True)
    except duckdb.Error as error:
        if not all(Path(part).exists() for part in parts):
            raise
        for part in map(Path, parts):
            verify(part)
        others = f", or another of the {len(parts)} like it" if len(parts) > 1 else ""
        raise unreadable(Path(parts[0]), f"{error}{others}") from error


def verify(part: Path) -> None:
    """Read a part in vain; one that has been deleted is passed over.

    Raises:
        RunDamaged: it cannot be read.
    """
    with suppress(FileNotFoundError), naming(part), open_regular(part) as opened, pq.ParquetFile(opened) as file:
        text_bytes(opened, file.metadata, part, loaded=file.schema_arrow.names)
        for group in range(file.num_row_groups):
            file.read_row_group(group).validate(full=True)


@contextmanager
def naming(part: Path) -> Iterator[None]:
    """Names the file in errors that are raised within the block."""
    try:
        yield
    except FileNotFoundError:  # deleted by the disk budget since it was listed
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise unreadable(part, error) from error


def unreadable(file: Path, why: object) -> RunDamaged:
    """A file that cannot be read."""
    return RunDamaged(
        f"{file} cannot be read ({why}). Move that file away and open the run again: the rest of it is intact."
    )


def _step_bounds(footer: pq.FileMetaData) -> Iterator[Any]:
    """Yields for each row group its smallest and largest step; None where they are not known."""
    place = next((n for n in range(footer.num_columns) if footer.schema.column(n).path == "step"), None)
    for number in range(footer.num_row_groups if place is not None else 0):
        told = footer.row_group(number).column(place).statistics
        yield (told.min, told.max) if told is not None and told.has_min_max else None
