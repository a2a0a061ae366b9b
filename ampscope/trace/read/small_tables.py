"""The rows of small tables, kept until there are others: of most runs that is all there is to read.

A query costs the database some milliseconds however little it reads, and a diagnosis asks for a few rows a hundred
times.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ampscope.trace.files.arrow_arrays import numbers_in
from ampscope.trace.read.part_columns import RANK
from ampscope.trace.read.table_folders import Stamp
from ampscope.trace.read.table_queries import ORDER, rows_from
from ampscope.trace.read.table_scan import OfRanks, Scan
from ampscope.trace.schema import Row, Table, arrow_schema

#: Rows of a table that is small, and those up to which the database is not asked at all.
MOST_ROWS, MOST_AT_HAND = 1 << 17, 8192
#: Stretches of a table that are put together for one step.
_MOST_STRETCHES = 64
#: Bytes of files that may hold so few rows, and those that a file takes without any; of more no footer is looked at.
_MOST_BYTES, _OF_FOOTER = 4 << 20, 6 << 10
#: Bytes that a row takes as an object, roughly.
_OF_A_ROW = 1 << 10
#: Bytes of all tables that are kept.
MOST_KEPT = 256 << 20


class SmallTable:
    """All rows of a table at one moment.

    Args:
        table: Which.
        arrow: Its rows, with their ranks.
    """

    def __init__(self, table: Table, arrow: pa.Table) -> None:
        self._table = table
        self.arrow = arrow.combine_chunks()
        rows = self.arrow.num_rows if self._is_at_hand else 0
        self.size = self.arrow.nbytes + rows * _OF_A_ROW  #: bytes, at most

    def rows(self, equals: Mapping[str, object]) -> list[Any] | None:
        """The rows whose columns equal what is given, in their order; None where that is to be asked the database."""
        if not {*equals} <= {*arrow_schema(self._table).names}:
            return None
        if not self._is_at_hand:
            part = self._part(equals)
            return part.rows(equals) if part is not None else None
        rows = self._sorted
        for name, value in equals.items():
            rows = [row for row in rows if _is_equal(_value(row, name), value)]
        return rows[:] if rows is self._sorted else rows

    @property
    def _is_at_hand(self) -> bool:
        """Whether its rows are kept as such: those of a table that is asked for as a whole again and again always."""
        return self._table is Table.SITES or self.arrow.num_rows <= MOST_AT_HAND

    def _part(self, equals: Mapping[str, object]) -> SmallTable | None:
        """The rows of the step, and of the execution, that is asked for; None where none is, or they are many.

        What belongs together is written together, so that a few stretches of the table hold it.
        """
        step, source = equals.get("step"), equals.get("source")
        if type(step) is not int:
            return None
        found = [self.arrow.slice(begin, count) for begin, count in _stretches(numbers_in(self.arrow["step"]) == step)]
        if source is not None and len(found) <= _MOST_STRETCHES:
            told = [np.array(each["source"].to_pylist(), object) == source for each in found]
            found = [
                each.slice(begin, count)
                for each, own in zip(found, told, strict=True)
                for begin, count in _stretches(own)
            ]
        if len(found) > _MOST_STRETCHES or sum(each.num_rows for each in found) > MOST_AT_HAND:
            return None
        return SmallTable(self._table, pa.concat_tables(found) if found else self.arrow.slice(0, 0))

    @cached_property
    def _sorted(self) -> list[Any]:
        rows = rows_from(self._table, [self.arrow[name] for name in arrow_schema(self._table).names])
        places = [[getattr(row, name) for name in ORDER[self._table]] for row in rows]
        keys = [
            (rank, *map(_sort_key, place)) for rank, place in zip(self.arrow[RANK].to_pylist(), places, strict=True)
        ]
        return [rows[place] for place in sorted(range(len(rows)), key=keys.__getitem__)]


_Key = tuple[Table, tuple[int, ...]]
_Known = tuple[Stamp, SmallTable | None]


class SmallTables:
    """The small tables of one run.

    Args:
        scan: Reads them.
    """

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self._known: dict[_Key, _Known] = {}
        self._kept = 0  #: bytes of all of them
        self._lock = threading.Lock()

    def get(
        self, connection: duckdb.DuckDBPyConnection, table: Table, rank: OfRanks, stamp: Stamp
    ) -> SmallTable | None:
        """A table as it is now; None where it is not small.

        Args:
            connection: That reads it where it has many parts.
            table: Which.
            rank: Of which ranks.
            stamp: What tells this moment of the table.

        Raises:
            RunDamaged: a part cannot be read.
        """
        key = table, tuple(self._scan.meant(rank))
        known = self._known.get(key)
        if known is None or known[0] != stamp:
            known = stamp, self._load(connection, table, rank, stamp)
            self._keep(key, known)
        return known[1]

    def _keep(self, key: _Key, known: _Known) -> None:
        """Keep a table, and of others those that were loaded last, as many as there is room for."""
        with self._lock:
            self._kept += _size(known) - _size(self._known.pop(key, None))
            self._known[key] = known
            while self._kept > MOST_KEPT:
                self._kept -= _size(self._known.pop(next(iter(self._known))))

    def _load(
        self, connection: duckdb.DuckDBPyConnection, table: Table, rank: OfRanks, stamp: Stamp
    ) -> SmallTable | None:
        if sum(max(size - _OF_FOOTER, 0) for _, size, _ in stamp) > _MOST_BYTES:
            return None
        rows = self._scan.load(connection, table, rank=rank, most=MOST_ROWS)
        return None if rows is None else SmallTable(table, rows)


def _stretches(chosen: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Returns the stretches of rows that are chosen, as begin and length."""
    ends = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0))
    return [(begin, end - begin) for begin, end in zip(ends[::2].tolist(), ends[1::2].tolist(), strict=True)]


def _size(known: _Known | None) -> int:
    return known[1].size if known is not None and known[1] is not None else 0


def _value(row: Row, name: str) -> object:
    return getattr(row if name in row._fields else row.statistics, name)  # type: ignore[union-attr]  # an op's


def _is_equal(own: object, value: object) -> bool:
    """Compares two values as the database does, for which NaN equals NaN."""
    return own == value or (_is_nan(own) and _is_nan(value))


def _sort_key(value: Any) -> Any:
    return math.inf if _is_nan(value) else value


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)
