"""The disk budget: which sealed parts go, and which are thinned, when a run has grown too large."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ampscope.trace.files.layout import list_table, rank_folder, span_of, table_folder
from ampscope.trace.files.whole_files import remove
from ampscope.trace.schema import BULK_TABLES, Source, Table
from ampscope.trace.write.sealing import thin
from ampscope.trace.write.thinning import THINNED_TABLES, WINDOWS

#: What the rows of a run take, beside its bulk tables, before the old ones are thinned: some nine million steps.
_MOST_RECORD_BYTES = 256 << 20


def enforce(run: Path, rank: int, budget: int) -> int:
    """Delete sealed parts of the bulk tables until the rank's folder takes at most ``budget`` bytes.

    Gradients and live traces go first, oldest first; then replays, which are the evidence of incidents.
    Nothing else is ever deleted; `thin_oldest` keeps the rest small.

    Returns:
        The number of bytes that were freed.

    Raises:
        OSError: the folder cannot be changed.
    """
    excess = _size(run, rank) - budget
    freed = 0
    if excess <= 0:
        return freed
    for part in _by_worth(run, rank):
        if freed >= excess:
            break
        size = bytes_of(part)
        freed += size if remove(part) else 0
    return freed


def record_share(budget: int) -> int:
    """Bytes of a budget that all but the bulk tables may take before their old rows are thinned."""
    return min(budget // 2, _MOST_RECORD_BYTES)


def thin_oldest(run: Path, rank: int, most: int) -> bool:
    """Thin sealed parts of the tables that have a row for each step until all but the bulk tables take ``most`` bytes.

    What is large and long ago goes first; the newest part of a table stays as it is. No row is left out, so a folder
    can stay above what is too little for all that went wrong in it.

    Returns:
        Whether steps have lost values.

    Raises:
        OSError: the folder cannot be changed.
    """
    excess = _record_size(run, rank) - most
    if excess <= 0:
        return False
    parts = [list(_parts(run, rank, table).values()) for table in THINNED_TABLES]
    sizes = {part: part.stat().st_size for each in parts for part in each}
    ages = {part: age for each in parts for age, part in enumerate(reversed(each))}
    waiting = {part for part, age in ages.items() if age and span_of(part).level < len(WINDOWS)}
    lost = False
    while excess > 0 and waiting:
        part = max(waiting, key=lambda one: (sizes[one] * ages[one], one))
        waiting.remove(part)
        new = thin(part, Table(part.parent.name))
        if new is None:
            continue
        lost = lost or part.parent.name == Table.STEPS
        sizes[new], ages[new] = new.stat().st_size, ages[part]
        excess -= sizes[part] - sizes[new]
        if span_of(new).level < len(WINDOWS):
            waiting.add(new)
    return lost


def _by_worth(run: Path, rank: int) -> list[Path]:
    parts = [part for table in BULK_TABLES for part in list_table(table_folder(run, rank, table)).parts.values()]
    return sorted(parts, key=lambda part: (holds_replay(part), _age(part)))


def bytes_of(part: Path) -> int:
    """Bytes of a file; none of one that has left, as what has arrived in an object store does."""
    try:
        return part.stat().st_size
    except FileNotFoundError:
        return 0


def _age(part: Path) -> int:
    try:
        return part.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


@lru_cache(maxsize=4096)  # a part never changes
def holds_replay(part: Path) -> bool:
    """Whether a part of a bulk table holds more than live traces: the evidence of an incident."""
    if part.parent.name == Table.GRADS:
        return False
    try:
        metadata = pq.read_metadata(part)
    except (pa.ArrowException, OSError):
        return False
    column = metadata.schema.names.index("source")
    groups = [metadata.row_group(group).column(column).statistics for group in range(metadata.num_row_groups)]
    return any(group is None or not group.has_min_max or not group.max.startswith(Source.LIVE) for group in groups)


def _parts(run: Path, rank: int, table: Table) -> dict[int, Path]:
    return list_table(table_folder(run, rank, table)).parts


def _size(run: Path, rank: int) -> int:
    """Bytes of a rank's folder, without the parts that are about to be deleted."""
    folder = rank_folder(run, rank)
    gone = {part for table in THINNED_TABLES for part in list_table(folder / table.value).superseded}
    return sum(bytes_of(path) for path in folder.glob("*/*") if path not in gone)


def _record_size(run: Path, rank: int) -> int:
    """Bytes of the sealed parts of all but the bulk tables."""
    tables = [table for table in Table if table not in BULK_TABLES]
    return sum(part.stat().st_size for table in tables for part in _parts(run, rank, table).values())
