"""One table of a run as a DuckDB relation: sealed parts, read lazily, and the readable prefix of journals."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Sequence
from functools import reduce
from itertools import chain
from pathlib import Path

import duckdb
import pyarrow as pa

from ampscope.trace.files.journal import JournalReader
from ampscope.trace.files.layout import part_path, ranks, span_of
from ampscope.trace.files.parquet_part import ExecutionRows
from ampscope.trace.read.duckdb_engine import Pieces
from ampscope.trace.read.older_versions import CHANGED, is_older, upgraded
from ampscope.trace.read.part_columns import conform, no_rows, of_rank, selection, with_rank, wrong_rows
from ampscope.trace.read.sealed_parts import (
    Facts,
    bound,
    naming,
    read_columns,
    read_facts,
    read_part,
    refuse_too_many_texts,
    texts_in,
    unreadable,
    verify,
)
from ampscope.trace.read.table_folders import Stamp, TableFolders, steadily
from ampscope.trace.schema import BULK_TABLES, Table, arrow_schema

#: One rank, several, or all.
OfRanks = int | tuple[int, ...] | None


class Scan:
    """Reads the tables of one run.

    Remembers the footers of sealed parts, which never change, and the rows of journals, which only grow. It has many
    methods because each way to read a table begins with the same look at the folder.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._folders = TableFolders(run)
        self._facts: dict[Path, Facts] = {}
        self._texts: dict[Path, int] = {}
        self._journals: dict[tuple[int, Table], dict[Path, JournalReader]] = {}
        self._lock = threading.Lock()

    def stamp(self, table: Table, rank: OfRanks = None) -> Stamp:
        """The state of ``table`` on the disk: another one whenever rows were added or parts were dropped.

        Args:
            table: The table.
            rank: The rank whose rows are meant, or several; by default those of all.
        """
        return tuple(state for each in self.meant(rank) for state in self._folders.stamp(each, table))

    def relation(
        self,
        connection: duckdb.DuckDBPyConnection,
        table: Table,
        *,
        steps: Sequence[int] | None = None,
        rank: OfRanks = None,
    ) -> duckdb.DuckDBPyRelation:
        """The rows of ``table`` that can be read now, of all ranks or of one, with the schema's columns and `RANK`.

        With ``steps``, which ascend, parts that cannot hold a row of them are left out; rows of others are still there.
        """
        meant = self.meant(rank)
        return steadily(lambda: self._bound_now(connection, table, meant, steps))

    def _bound_now(
        self, connection: duckdb.DuckDBPyConnection, table: Table, meant: Sequence[int], steps: Sequence[int] | None
    ) -> duckdb.DuckDBPyRelation:
        sealed, loaded = self._pieces_now(table, meant)
        relations = self._sealed(connection, table, sealed, steps)
        if loaded.num_rows or not relations:  # each relation that is bound takes a millisecond
            relations.insert(0, connection.from_arrow(loaded))
        return reduce(duckdb.DuckDBPyRelation.union, relations)

    def pieces(self, table: Table, *, rank: OfRanks = None) -> Pieces:
        """Returns the pieces that `relation` would be made of, for another engine; its parts are checked alike."""
        meant = self.meant(rank)

        def look() -> Pieces:
            sealed, loaded = self._pieces_now(table, meant)
            return Pieces(self._chosen(table, sealed, None), loaded)

        return steadily(look)

    def _pieces_now(self, table: Table, meant: Sequence[int]) -> tuple[list[Path], pa.Table]:
        loaded: list[pa.Table] = []
        sealed: list[Path] = []
        for each in meant:
            parts, journaled = self._snapshot(each, table)
            older = self._older(table, parts)
            upgrades = [self._loaded(part, table) for part in older]
            rows = pa.concat_tables([*upgrades, journaled]) if older else journaled
            if rows.num_rows:
                loaded.append(of_rank(rows, each))
            sealed += [part for part in parts if part not in older]
        return sealed, pa.concat_tables([no_rows(with_rank(table)), *loaded])

    def load(
        self, connection: duckdb.DuckDBPyConnection, table: Table, *, rank: OfRanks = None, most: int
    ) -> pa.Table | None:
        """All rows of a table, with `RANK`; None where there are more than ``most`` of them.

        Raises:
            RunDamaged: a part cannot be read.
        """
        meant = self.meant(rank)
        return steadily(lambda: self._loaded_now(connection, table, meant, most))

    def _loaded_now(
        self, connection: duckdb.DuckDBPyConnection, table: Table, meant: Sequence[int], most: int
    ) -> pa.Table | None:
        taken = [(each, *self._snapshot(each, table)) for each in meant]
        count = sum(journaled.num_rows for _, _, journaled in taken)
        parts = [part for _, listed, _ in taken for part in listed]
        for part in parts:
            count += self._facts_of(part, table, with_texts=len(parts) > _FEW_PARTS).rows
            if count > most:
                return None
        if len(parts) > _FEW_PARTS:
            return self._bound_now(connection, table, meant, None).to_arrow_table()
        pieces = [of_rank(journaled, each) for each, _, journaled in taken]
        pieces += [of_rank(self._loaded(part, table), each) for each, listed, _ in taken for part in listed]
        return pa.concat_tables([no_rows(with_rank(table)), *pieces])

    def _loaded(self, part: Path, table: Table) -> pa.Table:
        return conform(upgraded(table, read_part(part)), arrow_schema(table))

    def traced(self, connection: duckdb.DuckDBPyConnection, rank: int) -> list[ExecutionRows]:
        """Lists the traced steps of one rank, in no order; rows of parts whose footer does not tell are counted.

        Raises:
            RunDamaged: a part cannot be read.
        """
        return steadily(lambda: self._traced_now(connection, rank))

    def _traced_now(self, connection: duckdb.DuckDBPyConnection, rank: int) -> list[ExecutionRows]:
        table = Table.OPS
        parts, journaled = self._snapshot(rank, table)
        told = {part: self._facts_of(part, table).traced for part in parts}
        relations = self._sealed(connection, table, [part for part in parts if told[part] is None], None)
        if journaled.num_rows:
            relations.append(connection.from_arrow(of_rank(journaled, rank)))
        found: Counter[tuple[int, str]] = Counter()
        for each in chain.from_iterable(index or () for index in told.values()):
            found[each.step, each.source] += each.rows
        for relation in relations:
            for step, source, rows in relation.aggregate("step, source, count(*)", "step, source").fetchall():
                found[step, source] += rows
        return [ExecutionRows(step, source, rows) for (step, source), rows in found.items()]

    def verify(self, table: Table) -> None:
        """Read every part of a table in vain.

        Raises:
            RunDamaged: one cannot be read; the message names it.
        """
        for rank in ranks(self._run):
            for part in self._folders.listing(rank, table).parts.values():
                verify(part)

    def read(self, table: Table, rank: int, columns: Collection[str]) -> pa.Table:
        """Some columns of what one rank wrote, loaded without a database: for a look at many runs.

        Raises:
            RunDamaged: a part cannot be read.
        """
        schema = pa.schema([field for field in arrow_schema(table) if field.name in columns])

        def look() -> pa.Table:
            parts, journaled = self._snapshot(rank, table)
            pieces = [conform(self._read_columns(part, table, schema.names), schema) for part in parts]
            return pa.concat_tables([*pieces, journaled.select(schema.names)])

        return steadily(look)

    def count(self, table: Table, rank: int) -> int:
        """How many rows one rank wrote.

        Raises:
            RunDamaged: a part cannot be read.
        """

        def look() -> int:
            parts, journaled = self._snapshot(rank, table)
            return sum(self._facts_of(part, table).rows for part in parts) + int(journaled.num_rows)

        return steadily(look)

    def meant(self, rank: OfRanks) -> Sequence[int]:
        """The ranks whose rows are meant."""
        if rank is None:
            return ranks(self._run)
        return (rank,) if isinstance(rank, int) else rank

    def _sealed(
        self, connection: duckdb.DuckDBPyConnection, table: Table, parts: list[Path], steps: Sequence[int] | None
    ) -> list[duckdb.DuckDBPyRelation]:
        """One relation for all parts that have the same columns, however many ranks wrote them."""
        by_columns = self._chosen(table, parts, steps)
        return [
            bound(connection, [*map(str, paths)]).select(selection(table, columns))
            for columns, paths in by_columns.items()
        ]

    def _chosen(
        self, table: Table, parts: list[Path], steps: Sequence[int] | None
    ) -> dict[tuple[str, ...], list[Path]]:
        """The parts that may hold some steps, by their columns.

        Raises:
            RunDamaged: they hold more than is read.
        """
        by_columns: dict[tuple[str, ...], list[Path]] = {}
        rows = texts = 0
        for part in parts:
            facts = self._facts_of(part, table, with_texts=steps is None)
            rows += facts.rows
            texts += self._texts_of(part) if facts.may_hold(steps) else 0
            if rows > _MOST_ROWS and table not in BULK_TABLES:
                raise unreadable(part, f"with it {table.value} has more than the {_MOST_ROWS:,} rows that are read")
            if facts.may_hold(steps):
                by_columns.setdefault(facts.columns, []).append(part)
        if table not in BULK_TABLES:
            with naming(self._run / "rank=*" / table.value):
                named = {columns: [*map(str, paths)] for columns, paths in by_columns.items()}
                refuse_too_many_texts(self._run, table, rows=rows, bound=texts, parts=named)
        return by_columns

    def _snapshot(self, rank: int, table: Table) -> tuple[list[Path], pa.Table]:
        """Parts and journaled rows that belong together, though journals may be sealed while this looks.

        Numbers are given in order, so all up to the highest seen existed then. One that is renamed from journal to part
        during the first look can escape it; the second look sees the part.
        """
        both = self._folders.listing(rank, table).joined(self._folders.listing(rank, table))
        parts, journaled = dict(both.parts), []
        for journal in both.open_journals:
            try:
                journaled.append(self._read_journal(rank, table, journal))
            except FileNotFoundError:  # sealed since
                part = part_path(journal)
                parts[span_of(part).first] = part
            except OSError as error:
                raise unreadable(journal, error) from error
        return [parts[number] for number in sorted(parts)], _conform_all(table, journaled)

    def _read_journal(self, rank: int, table: Table, journal: Path) -> pa.Table:
        with self._lock:
            known = self._journals.setdefault((rank, table), {})
            for other in [path for path in known if path < journal]:
                del known[other]  # sealed, or about to be
            rows = known.setdefault(journal, JournalReader(journal)).read()
        if rows.num_rows and (why := wrong_rows(table, rows)):
            raise unreadable(journal, why)
        return rows

    def _read_columns(self, part: Path, table: Table, columns: list[str]) -> pa.Table:
        self._facts[part], rows = read_columns(part, table, columns)
        return upgraded(table, read_part(part)) if self._older(table, [part]) else rows

    def _older(self, table: Table, parts: list[Path]) -> list[Path]:
        """The parts whose rows have to be loaded and upgraded: never those of a large table."""
        return [part for part in parts if table in CHANGED and is_older(table, self._facts_of(part, table).columns)]

    def _texts_of(self, part: Path) -> int:
        """Bytes of a part's texts; its pages are looked at before it is read for the first time."""
        if part not in self._texts:
            self._texts[part] = texts_in(part)
        return self._texts[part]

    def _facts_of(self, part: Path, table: Table, *, with_texts: bool = False) -> Facts:
        if part not in self._facts:
            self._facts[part] = read_facts(part, table, self._texts if with_texts else None)
        return self._facts[part]


#: Parts that are read one by one sooner than by the database.
_FEW_PARTS = 16
#: Rows of a table, all its parts together, that are read; of the bulk tables, which stay on the disk, any number.
_MOST_ROWS = 1 << 27


def _conform_all(table: Table, journaled: list[pa.Table]) -> pa.Table:
    schema = arrow_schema(table)
    conforming = [conform(upgraded(table, rows), schema) for rows in journaled if rows.num_rows]
    return pa.concat_tables([no_rows(schema), *conforming]).combine_chunks() if conforming else no_rows(schema)
