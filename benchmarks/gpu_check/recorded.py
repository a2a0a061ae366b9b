"""What a closed run recorded, read with pyarrow alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

Row = dict[str, Any]


def rows(folder: Path, table: str, **having: Any) -> list[Row]:
    """The rows of a table of rank 0 whose columns have these values."""
    parts = sorted((folder / "rank=0" / table).glob("part-*.parquet"))
    found = [row for part in parts for row in pq.read_table(part).to_pylist()]
    return [row for row in found if all(row[column] == value for column, value in having.items())]


def switched_off(folder: Path) -> list[str]:
    """What AMPscope says about parts of its own that failed in the run."""
    return [row["text"] for row in rows(folder, "events") if row["kind"] == "warning"]


def first_bad(folder: Path, step: int, source: str = "replay") -> Row | None:
    """The op that first gave a value that is not finite in a traced step: a row of ``ops`` with that of its site."""
    sites = {row["site"]: row for row in rows(folder, "sites")}
    for op in sorted(rows(folder, "ops", step=step, source=source), key=lambda row: row["seq"]):
        if any(op[count] for count in ("nan", "posinf", "neginf")):
            return op | sites[op["site"]]
    return None


def ops_of(folder: Path, step: int, source: str) -> list[str]:
    """The names of the ops of a traced step, in order."""
    sites = {row["site"]: row["op"] for row in rows(folder, "sites")}
    found = sorted(rows(folder, "ops", step=step, source=source), key=lambda row: (row["seq"], row["out"]))
    return [sites[row["site"]] for row in found if row["out"] == 0 and sites[row["site"]].startswith("aten.")]
