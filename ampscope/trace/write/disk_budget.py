"""The disk budget: which sealed parts go when a run has grown too large."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ampscope.trace.files.layout import list_table, table_folder
from ampscope.trace.schema import BULK_TABLES, Source, Table


def enforce(run: Path, rank: int, budget: int) -> int:
    """Delete sealed parts of the bulk tables until the rank's folder takes at most ``budget`` bytes.

    Gradients and live traces go first, oldest first; then replays, which are the evidence of incidents.
    Nothing else is ever deleted, so a folder can stay above a budget that is too small.

    Returns:
        The number of bytes that were freed.

    Raises:
        OSError: the folder cannot be changed.
    """
    excess = _size(table_folder(run, rank, Table.OPS).parent) - budget
    freed = 0
    if excess <= 0:
        return freed
    for part in _by_worth(run, rank):
        if freed >= excess:
            break
        freed += part.stat().st_size
        part.unlink(missing_ok=True)
    return freed


def _by_worth(run: Path, rank: int) -> list[Path]:
    parts = [part for table in BULK_TABLES for part in list_table(table_folder(run, rank, table)).parts.values()]
    return sorted(parts, key=lambda part: (_holds_replay(part), part.stat().st_mtime_ns))


@lru_cache(maxsize=4096)  # a part never changes
def _holds_replay(part: Path) -> bool:
    if part.parent.name == Table.GRADS:
        return False
    try:
        metadata = pq.read_metadata(part)
    except (pa.ArrowException, OSError):
        return False
    column = metadata.schema.names.index("source")
    groups = [metadata.row_group(group).column(column).statistics for group in range(metadata.num_row_groups)]
    return any(group is None or not group.has_min_max or not group.max.startswith(Source.LIVE) for group in groups)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/*") if path.exists())
