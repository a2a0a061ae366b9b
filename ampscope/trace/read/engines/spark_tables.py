"""Tables as Spark's data frames: sealed parts, which Spark reads itself, and what is loaded beside them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from pyspark.sql.pandas.types import from_arrow_schema

from ampscope.trace.read.engines.engine import Pieces
from ampscope.trace.read.engines.spark_session import Session, session_for
from ampscope.trace.read.part_columns import RANK, RUN
from ampscope.trace.schema import Table, arrow_schema

#: The rank of a part, from the end of its path: a folder above the run may be called ``rank=3`` as well.
_RANK = r"rank(?:=|%3D)(\d+)/[^/]+/[^/]+$"
#: Columns of sealed parts, in Spark's SQL, which a session means in its own server; file names come as URLs, in which
#: decoding takes a plus for a space.
RANK_OF_PART = f"CAST(regexp_extract(_metadata.file_path, r'{_RANK}', 1) AS INT) AS {RANK}"
_FOLDER = f"regexp_replace(_metadata.file_path, r'/{_RANK}', '')"
_DECODED = f"url_decode(replace({_FOLDER}, '+', '%2B'))"
RUN_OF_PART = f"regexp_replace(regexp_replace({_DECODED}, '^file:/+', '/'), '^s3a://', 's3://') AS {RUN}"
#: Frames that are kept.
_KEPT = 64


class SparkTables:
    """Makes the frames of one run, or of a fleet.

    Args:
        asked: ``"spark"``, the address of a Spark Connect server, or a session.

    Raises:
        EngineError: there is no session to be had.
    """

    def __init__(self, asked: Any) -> None:
        session: Session = session_for(asked)
        self._session = session.spark
        self._frames: dict[Hashable, Any] = {}
        self._lock = threading.Lock()
        self._release = weakref.finalize(self, session.close)

    def frame(self, key: Hashable, table: Table, pieces: Callable[[], Pieces]) -> Any:
        """The rows of a table, with the columns of what is loaded of it; the same for the same ``key``."""
        with self._lock:
            known = self._frames.get(key)
        if known is None:
            known = self._made(table, pieces())
            with self._lock:
                self._frames[key] = known
                while len(self._frames) > _KEPT:
                    del self._frames[next(iter(self._frames))]
        return known

    def close(self) -> None:
        """End the session if it was started for this."""
        self._frames.clear()
        self._release()

    def _made(self, table: Table, pieces: Pieces) -> Any:
        rows = pieces.loaded.combine_chunks()  # to Spark, an empty chunk is the end of a table
        loaded = self._session.createDataFrame(rows, from_arrow_schema(rows.schema))
        if not pieces.parts:
            return loaded
        sealed = self._sealed(table, pieces)
        return sealed.unionByName(loaded) if rows.num_rows else sealed

    def _sealed(self, table: Table, pieces: Pieces) -> Any:
        schema = from_arrow_schema(arrow_schema(table))  # with null where an older part has no such column
        sealed = self._session.read.schema(schema).parquet(*map(_address, pieces.parts))
        return sealed.selectExpr("*", RANK_OF_PART, *([RUN_OF_PART] if RUN in pieces.loaded.column_names else []))


def _address(part: Any) -> str:
    """A file as Spark takes it: with its scheme, of which Hadoop has its own for S3, and without a pattern in it."""
    told = "".join(f"\\{each}" if each in "{}[]*?\\" else each for each in str(part))
    return told.replace("s3://", "s3a://", 1) if "://" in told else f"file://{told}"
