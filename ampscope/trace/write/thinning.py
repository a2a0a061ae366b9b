"""Thinning: old rows that keep what a run is judged by and leave the rest, so that a long run fits its disk budget.

Every row stays, and with it every count, skip and change of the loss scale. What goes are values that differ from step
to step and take nearly all the room: of steps the loss, the gradients' norm and the learning rate, where they are
finite and neither among the extremes of their window nor near something that stands out. Durations become their mean,
moments those of a later row, so that sums and order stay true; equal values side by side take next to no room.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ampscope.trace.files.arrow_arrays import column_of, known_in, numbers_in
from ampscope.trace.schema import EventKind, ScalerAction, Table, arrow_schema

#: Rows among which the extremes are kept, at each level of thinning; the last is not gone beyond.
WINDOWS = (32, 192, 1152)
#: Rows left whole before and after one that stands out: what an analysis of it compares it with.
_BEFORE, _AFTER = 72, 40
#: Rows of a part for each that stands out by its loss, its gradients, or as the first or last that went wrong.
_ROWS_PER_OUTSTANDING = 1 << 15

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


def thinned(table: Table, rows: pa.Table, level: int) -> pa.Table:
    """The rows of ``table``, which have its columns, thinned to ``level`` (from 1); none is left out."""
    return _THIN[table](rows, WINDOWS[level - 1]) if rows.num_rows else rows


def _steps(rows: pa.Table, window: int) -> pa.Table:
    order = np.lexsort((numbers_in(rows["step"]), numbers_in(rows["optimizer"])))  # `sort_by` would load a query engine
    rows = rows.take(column_of(order, pa.int64())).combine_chunks()
    left = ~_kept_steps(rows, window)
    rows = _later_times(rows, left)
    group = np.cumsum(~left)
    count = np.bincount(group[left], minlength=int(group[-1]) + 1)
    for name in ("duration_s", "observing_s"):
        own = _floats(rows, name)
        sums = np.bincount(group[left], weights=own[left], minlength=count.size)
        rows = _with(rows, name, np.where(left, (sums / np.maximum(count, 1))[group], own))
    for name in ("loss", "grad_norm", "clipped_grad_norm", "lr"):
        own = _floats(rows, name)
        rows = _with(rows, name, own, known=known_in(rows[name]) & ~(left & (np.isfinite(own) | (name == "lr"))))
    place = rows.schema.get_field_index("lrs")
    own_rates = rows["lrs"].take(pa.array(np.arange(left.size), mask=left))
    rows = rows.set_column(place, rows.schema.field(place), own_rates)
    number = np.where(left, count[group], numbers_in(rows["averaged"]))
    return _with(rows, "averaged", number, known=left | known_in(rows["averaged"]))


def _kept_steps(rows: pa.Table, window: int) -> Bools:
    """The steps that keep their own values."""
    loss, norm = _floats(rows, "loss"), _floats(rows, "grad_norm")
    bad = _flags(rows, "skipped") | (known_in(rows["loss"]) & ~np.isfinite(loss))
    kept = _at_changes(rows)
    for values in (loss, norm):
        kept[_extremes(values, window)] = True
    kept[_extremes(_floats(rows, "duration_s"), window)[1]] = True
    for place in _outstanding(loss, norm, bad):
        kept[max(place - _BEFORE, 0) : place + _AFTER] = True
    return kept


def _at_changes(rows: pa.Table) -> Bools:
    """Both sides of where the scale, the optimizer or the segment is another one, and the ends."""
    scale = np.nan_to_num(_floats(rows, "scale"), nan=-1.0)
    optimizer, segment = (numbers_in(rows[name]) for name in ("optimizer", "segment"))
    at = np.ones(rows.num_rows + 1, bool)
    at[1:-1] = (np.diff(scale) != 0) | (np.diff(optimizer) != 0) | (np.diff(segment) != 0)
    changes: Bools = at[1:] | at[:-1]
    return changes


def _extremes(values: Floats, window: int) -> NDArray[np.int64]:
    """The places of the smallest and of the largest of each ``window`` of values."""
    rows = -(-values.size // window)
    index = np.minimum(np.arange(rows * window), values.size - 1).reshape(rows, window)
    low, high = (np.where(np.isfinite(values), values, end)[index] for end in (np.inf, -np.inf))
    each = np.arange(rows)
    return np.stack([index[each, low.argmin(axis=1)], index[each, high.argmax(axis=1)]])


def _outstanding(loss: Floats, norm: Floats, bad: Bools) -> list[int]:
    """The rows whose neighbours stay, too: the first and last that went wrong, the largest losses and gradients."""
    most = bad.size // _ROWS_PER_OUTSTANDING
    if not most:  # in a part so small they would be most of it
        return []
    wrong = np.flatnonzero(bad)
    largest = [np.argsort(np.where(np.isfinite(values), values, -np.inf))[-most:] for values in (loss, norm)]
    return [int(place) for places in (wrong[:most], wrong[-most:], *largest) for place in places]


def _moments(is_routine: Callable[[pa.Table], Bools]) -> Callable[[pa.Table, int], pa.Table]:
    """Thins the moments of rows of which a loop makes one in each step; at the last level those of all rows."""

    def thin(rows: pa.Table, window: int) -> pa.Table:
        left = is_routine(rows) if window < WINDOWS[-1] else np.ones(rows.num_rows, bool)
        left[::window] = False
        left[-1] = False
        return _later_times(rows, left)

    return thin


def _is_one_of(column: str, *kinds: str) -> Callable[[pa.Table], Bools]:
    def told(rows: pa.Table) -> Bools:
        texts = rows[column].combine_chunks().dictionary_encode()
        wanted = [number for number, text in enumerate(texts.dictionary.to_pylist()) if text in kinds]
        return np.isin(numbers_in(pa.chunked_array([texts.indices])), wanted)

    return told


def _not_replayed(rows: pa.Table) -> Bools:
    """Incidents that came too often to be replayed."""
    return _flags(rows, "over_budget")


_THIN: dict[Table, Callable[[pa.Table, int], pa.Table]] = {
    Table.STEPS: _steps,
    Table.SCALER_EVENTS: _moments(_is_one_of("action", ScalerAction.UNSCALE, ScalerAction.SKIP)),
    Table.EVENTS: _moments(_is_one_of("kind", EventKind.TRACED)),
    Table.INCIDENTS: _moments(_not_replayed),
}
#: The tables that have a row for each step, or may have.
THINNED_TABLES = tuple(_THIN)


def _later_times(rows: pa.Table, left: Bools) -> pa.Table:
    """With the moment of the next row that stays as it is, in place of their own, where rows are ``left``."""
    kept = np.flatnonzero(~left)
    following = kept[np.minimum(np.searchsorted(kept, np.arange(left.size)), kept.size - 1)]
    return _with(rows, "time", _floats(rows, "time")[following])


def _floats(rows: pa.Table, name: str) -> Floats:
    """A column's values, null as not a number."""
    return np.where(known_in(rows[name]), numbers_in(rows[name]).astype(np.float64), np.nan)


def _flags(rows: pa.Table, name: str) -> Bools:
    """A column's flags, null as none."""
    return numbers_in(rows[name]) & known_in(rows[name])


def _with(rows: pa.Table, name: str, values: NDArray[Any], known: Bools | None = None) -> pa.Table:
    """With other values in a column; null where they are not ``known``."""
    place = rows.schema.get_field_index(name)
    field = rows.schema.field(place)
    return rows.set_column(place, field, column_of(values, field.type, known))


def fitting(table: Table, rows: pa.Table) -> pa.Table | None:
    """The rows with exactly today's columns; None where they are of an older or newer version and stay as they are."""
    schema = arrow_schema(table)
    missing = [field for field in schema if field.name not in rows.column_names]
    if not set(rows.column_names) <= set(schema.names) or not all(field.nullable for field in missing):
        return None
    columns = [rows[f.name] if f.name in rows.column_names else pa.nulls(rows.num_rows, f.type) for f in schema]
    return pa.table(columns, schema=schema)
