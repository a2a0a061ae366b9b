"""A table of many runs as one lazy frame, with the writing rank and the run's folder as last columns."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any

import duckdb
import narwhals as nw
import pyarrow as pa

from ampscope.errors import RunError
from ampscope.trace.files.arrow_arrays import text_of
from ampscope.trace.read.duckdb_engine import Pieces, sealed_off
from ampscope.trace.read.part_columns import RUN, RUN_FIELD, no_rows, selection, with_rank
from ampscope.trace.read.sealed_parts import bound
from ampscope.trace.read.table_queries import Chosen, chosen_engine
from ampscope.trace.read.table_scan import Scan
from ampscope.trace.schema import Table

#: Threads that look at folders: they wait for the disk.
_LOOKERS = 8
#: The run's folder of a part, from its path.
_RUN_OF_PART = r"regexp_replace(filename, '[/\\]rank=\d+[/\\][^/\\]+[/\\][^/\\]+$', '')"


class FleetTables:
    """Reads the tables of many runs, as they are when each is first asked for.

    Args:
        runs: Their folders.
        engine: What they are queried with, as for `ampscope.open_run`.

    Raises:
        EngineError: the engine is unknown or cannot be had.
    """

    def __init__(self, runs: Sequence[Path], engine: Chosen = "duckdb") -> None:
        self._runs = runs
        self._engine = chosen_engine(engine)
        self._database = sealed_off(*runs)
        self.unreadable: dict[Path, str] = {}  #: runs that are left out of a table, each with why

    def table(self, table: Table) -> nw.LazyFrame[Any]:
        """The rows of a table of all runs that can be read; the others are in `unreadable` then."""
        if self._engine is None:
            return nw.from_native(self._relation(table, self._pieces(table)))
        frame: nw.LazyFrame[Any] = nw.from_native(self._engine.frame(table, table, lambda: self._pieces(table)))
        return frame

    def close(self) -> None:
        """Give the memory back, and end what was started; frames that were taken are void."""
        if self._engine is not None:
            self._engine.close()
        self._database.close()

    def __enter__(self) -> FleetTables:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pieces(self, table: Table) -> Pieces:
        with ThreadPoolExecutor(_LOOKERS) as pool:
            found = [each for each in pool.map(lambda run: self._pieces_of(run, table), self._runs) if each is not None]
        loaded = [pieces.loaded for pieces in found if pieces.loaded.num_rows]
        sealed: dict[tuple[str, ...], list[Path]] = {}
        for columns, parts in chain.from_iterable(pieces.sealed.items() for pieces in found):
            sealed.setdefault(columns, []).extend(parts)
        return Pieces(sealed, pa.concat_tables([_of_run(no_rows(with_rank(table)), Path()), *loaded]))

    def _pieces_of(self, run: Path, table: Table) -> Pieces | None:
        try:
            pieces = Scan(run).pieces(table)
        except (RunError, OSError) as error:
            self.unreadable.setdefault(run, str(error))
            return None
        return pieces._replace(loaded=_of_run(pieces.loaded, run))

    def _relation(self, table: Table, pieces: Pieces) -> duckdb.DuckDBPyRelation:
        sealed = [
            bound(self._database, [*map(str, parts)]).select(f"{selection(table, columns)}, {_RUN_OF_PART} AS {RUN}")
            for columns, parts in pieces.sealed.items()
        ]  # each of parts that are alike, of which one is looked at
        return reduce(duckdb.DuckDBPyRelation.union, sealed, self._database.from_arrow(pieces.loaded))


def _of_run(rows: pa.Table, run: Path) -> pa.Table:
    return rows.append_column(RUN_FIELD, text_of(str(run), rows.num_rows))
