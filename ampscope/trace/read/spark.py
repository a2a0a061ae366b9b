"""Spark reads a run's tables, by the user's own session or by one that is started and stopped again."""

from __future__ import annotations

import os
import shutil
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from ampscope.errors import EngineError
from ampscope.trace.files.arrow_arrays import known_in, numbers_in
from ampscope.trace.read.duckdb_engine import Pieces, Query, unreadable_table
from ampscope.trace.read.part_columns import RANK, RUN
from ampscope.trace.read.spark_sql import FRAME, spark_text
from ampscope.trace.schema import Table, arrow_schema

#: Errors that mean a mistake in the query, not in the file.
_OURS = (AnalysisException, ParseException)


class SparkEngine:
    """Asks the Spark session that a frame belongs to."""

    def rows(self, frame: Any, query: Query) -> list[tuple[Any, ...]]:
        """The answer as rows of Python values."""
        columns = [column.to_pylist() for column in _asked(frame, query).columns]
        return list(zip(*columns, strict=True))

    def arrays(self, frame: Any, query: Query) -> dict[str, npt.NDArray[Any]]:
        """The answer as arrays by name, masked where null; a list's column holds arrays."""
        found = _asked(frame, query)
        return dict(zip(found.column_names, map(_array, found.columns), strict=True))

    def batches(self, frame: Any) -> Iterator[pa.RecordBatch]:
        """The rows of a frame, some at a time."""
        yield from frame.toArrow().to_batches()

    def names(self, frame: Any) -> list[str]:
        """The columns of a frame, in order."""
        return list(frame.columns)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around a query."""
        try:
            yield
        except _OURS:
            raise
        except PySparkException as error:
            raise unreadable_table(error) from error


def _asked(frame: Any, query: Query) -> pa.Table:
    if query == Query():
        return frame.toArrow()
    return frame.sparkSession.sql(spark_text(query), **{FRAME: frame}).toArrow()


def _array(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        values = numbers_in(column)
    else:
        given = column.to_pylist()
        values = np.empty(len(given), object)
        values[:] = [np.asarray(each) for each in given] if pa.types.is_list(kind) else given
    return np.ma.masked_array(values, ~known_in(column)) if column.null_count else values


#: What a session of ours is set to: a guest on the machine, that serves no page and says nothing.
_SETTINGS = {
    "spark.app.name": "ampscope",
    "spark.driver.maxResultSize": "0",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
#: To hear from a server, of which the last comes some five seconds after the first.
_TRIES = 4
#: The driver's memory, which in local mode is all there is.
_MEMORY = "4g"


class Session(NamedTuple):
    """A session, and whether it is ours to stop."""

    spark: Any
    is_ours: bool

    def close(self) -> None:
        """Stop it, if it was started here and no other run needs it."""
        if self.is_ours:
            _let_go(self.spark)


_lock = threading.Lock()
#: By the session's identity, how many runs use a session that was started here.
_users: dict[int, int] = {}


def session_for(asked: Any) -> Session:
    """The session that is asked for.

    Args:
        asked: ``"spark"``, the address of a Spark Connect server, or a session.

    Raises:
        EngineError: it is no session, or none can be had.
    """
    if not isinstance(asked, str):
        if not (hasattr(asked, "createDataFrame") and hasattr(asked, "read")):
            raise EngineError(f"{asked!r} is no engine: give a name, the address of a server, or a SparkSession.")
        return Session(asked, is_ours=False)
    with _lock:
        session = _connected(asked) if asked.startswith("sc://") else _here()
        if session.is_ours:
            _users[id(session.spark)] = _users.get(id(session.spark), 0) + 1
        return session


def _here() -> Session:
    """The session that this process has, or a new one: where spark-submit or the environment say, else on all cores."""
    active = SparkSession.getActiveSession()
    if active is not None:
        return Session(active, is_ours=id(active) in _users)
    if not _has_java():
        raise EngineError("Spark needs Java 17 or newer, and there is none: install one, or set JAVA_HOME.")
    builder: Any = SparkSession.builder
    for name, value in _SETTINGS.items():
        builder = builder.config(name, value)
    if "SPARK_MASTER" in os.environ:
        builder = builder.master(os.environ["SPARK_MASTER"])
    try:
        return Session(builder.config("spark.driver.memory", _MEMORY).getOrCreate(), is_ours=True)
    except (PySparkException, OSError, RuntimeError) as error:
        raise EngineError(f"Spark cannot be started: {_first_line(error)}.") from error


def _connected(address: str) -> Session:
    """A session of a Spark Connect server."""
    try:
        from pyspark.sql.connect.session import SparkSession as Connected

        spark = Connected.builder.remote(address).create()
        _greet(spark)
    except ImportError as error:
        raise EngineError(f"Spark Connect is not installed ({error}): pip install 'ampscope[spark]'.") from error
    except Exception as error:  # of gRPC, whose errors have no base that PySpark names
        raise EngineError(f"Spark Connect at {address} does not answer: {_first_line(error)}.") from error
    return Session(spark, is_ours=True)


def _greet(spark: Any) -> None:
    """Ask something of a server, with a few tries: by itself PySpark asks for ten minutes whether anybody is there."""
    from pyspark.sql.connect.client.retries import DefaultPolicy

    usual = spark.client.get_retry_policies()
    spark.client.set_retry_policies([DefaultPolicy(max_retries=_TRIES)])
    spark.range(1).collect()
    spark.client.set_retry_policies(usual)


def _let_go(spark: Any) -> None:
    with _lock:
        _users[id(spark)] -= 1
        if _users[id(spark)]:
            return
        del _users[id(spark)]
    spark.stop()


def _has_java() -> bool:
    home = os.environ.get("JAVA_HOME")
    return "SPARK_REMOTE" in os.environ or (
        (Path(home) / "bin" / "java").exists() if home else shutil.which("java") is not None
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


#: The rank of a part, from the end of its path: a folder above the run may be called ``rank=3`` as well.
_RANK_IN_NAME = r"rank(?:=|%3D)(\d+)/[^/]+/[^/]+$"
#: Columns of sealed parts, in Spark's SQL, which a session means in its own server; file names come as URLs, in which
#: decoding takes a plus for a space.
RANK_OF_PART = f"CAST(regexp_extract(_metadata.file_path, r'{_RANK_IN_NAME}', 1) AS INT) AS {RANK}"
_FOLDER = f"regexp_replace(_metadata.file_path, r'/{_RANK_IN_NAME}', '')"
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
