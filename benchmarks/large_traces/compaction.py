"""What compaction makes of a run in very many small files: ``python benchmarks/large_traces/compaction.py FOLDER``.

FOLDER holds a run as `many_ranks.py` writes it. Each of its parts is cut into neighbours, as if the job had been
restarted that often; then files, bytes and the time of a diagnosis are told, before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq

from ampscope.trace.compaction import compact
from ampscope.trace.files.layout import Span, list_table, rank_folder, ranks, span_path
from ampscope.trace.files.parquet_part import write_part
from ampscope.trace.schema import Table


def cut(folder: Path, pieces: int) -> None:
    """Cut every part into so many, as far as it has rows."""
    for rank in ranks(folder):
        for table in Table:
            listing = list_table(rank_folder(folder, rank) / table.value)
            if len(listing.parts) != 1:
                continue  # cut already
            (part,) = listing.parts.values()
            rows = pq.read_table(part)
            each = -(-rows.num_rows // pieces) or 1
            for number, begin in enumerate(range(each, rows.num_rows, each), start=1):
                write_part(rows.slice(begin, each), span_path(part.parent, Span(number, number)))
            write_part(rows.slice(0, each), part)


def diagnosed(folder: Path) -> dict[str, object]:
    """Seconds of a diagnosis, in a process of its own, and what it says."""
    pipe, end = os.pipe()
    if (child := os.fork()) == 0:
        from ampscope.analysis.diagnosis.diagnosis import diagnose

        begun, processor = time.perf_counter(), time.process_time()
        said = diagnose(folder).summary
        told = {"wall": time.perf_counter() - begun, "processor": time.process_time() - processor, "said": said}
        os.write(end, json.dumps(told).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(end)
    with os.fdopen(pipe) as answer:
        found: dict[str, object] = json.loads(answer.read())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pieces", type=int, default=8)
    asked = parser.parse_args()
    cut(asked.folder, asked.pieces)
    print("before:", diagnosed(asked.folder))
    begun, processor = time.perf_counter(), time.process_time()
    (done,) = compact([asked.folder], age=0.0).runs
    spent = f"{time.perf_counter() - begun:.0f} s, {time.process_time() - processor:.0f} s of the processor"
    print(f"{done.ranks} ranks: {done.before} -> {done.after}, in {spent}")
    print("after:", diagnosed(asked.folder))
    sys.exit(bool(done.left_alone))


if __name__ == "__main__":
    main()
