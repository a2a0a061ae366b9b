"""Many rows of one table, given column by column: what was measured as arrays need not become rows first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ampscope.trace.files.arrow_arrays import column_of, flags_of, text_of, to_array
from ampscope.trace.schema import Table, arrow_schema


@dataclass(frozen=True, slots=True)
class ColumnBlock:
    """Rows of one table.

    Attributes:
        rows: How many.
        columns: By name, numbers, flags or (as objects) tuples of that many, or one text or integer that all rows have.
            A column that is missing is null.
        known: Of columns with nulls, which values are none.
    """

    rows: int
    columns: Mapping[str, NDArray[Any] | str | int]
    known: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.rows

    def fitting(self, table: Table) -> ColumnBlock:
        """The rows whose integers all fit their columns."""
        fits = np.ones(self.rows, bool)
        for kind, values in self._integers(table):
            fits &= (values >= kind.min) & (values <= kind.max)
        return self.where(fits)

    def where(self, chosen: NDArray[np.bool_]) -> ColumnBlock:
        """The rows that are chosen."""
        columns = {
            name: value if isinstance(value, (str, int)) else value[chosen] for name, value in self.columns.items()
        }
        known = {name: value[chosen] for name, value in self.known.items()}
        return replace(self, rows=int(chosen.sum()), columns=columns, known=known)

    def to_batch(self, table: Table) -> pa.RecordBatch:
        """The rows as they are written.

        Raises:
            ValueError: nothing where a value is required.
            OverflowError: an integer does not fit its column.
        """
        for kind, values in self._integers(table):
            if self.rows and (values.min() < kind.min or values.max() > kind.max):
                raise OverflowError(f"{kind.dtype} holds no {values.min()} or {values.max()}")
        schema = arrow_schema(table)
        return pa.RecordBatch.from_arrays([self._column(each) for each in schema], schema=schema)

    def _column(self, column: pa.Field) -> pa.Array:
        value, kind = self.columns.get(column.name), column.type
        if value is None:
            if not column.nullable:
                raise ValueError(f"column {column.name!r} must not be null")
            return pa.nulls(self.rows, kind)
        if isinstance(value, str):
            return text_of(value, self.rows)
        if isinstance(value, int):
            value = np.full(self.rows, value)
        if pa.types.is_list(kind):
            return to_array(value.tolist(), kind)
        return flags_of(value) if pa.types.is_boolean(kind) else column_of(value, kind, self.known.get(column.name))

    def _integers(self, table: Table) -> list[tuple[np.iinfo[Any], NDArray[Any]]]:
        """The columns of integers that may not fit, and what fits them."""
        columns = [(each.type, self.columns.get(each.name)) for each in arrow_schema(table)]
        return [
            (np.iinfo(np.int16 if kind == pa.int16() else np.int32), np.atleast_1d(value))
            for kind, value in columns
            if kind in {pa.int16(), pa.int32()} and value is not None and not isinstance(value, str)
        ]
