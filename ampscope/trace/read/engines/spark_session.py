"""The Spark session that a run is queried with: the user's own, or one that is started and stopped again."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from ampscope.errors import EngineError

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
