"""An engine that cannot be had is told with what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ampscope import open_run
from ampscope.errors import EngineError
from tests.support.trace_builder import TraceBuilder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    builder = TraceBuilder(tmp_path / "run")
    builder.step()
    return builder.close()


def test_an_unknown_engine_is_refused_with_those_that_there_are(path: Path) -> None:
    with pytest.raises(EngineError, match=r"no engine 'polars': give duckdb, spark, or sc://host:port"):
        open_run(path, engine="polars")


def test_without_pyspark_the_extra_is_named(path: Path) -> None:
    assert "pip install 'ampscope[spark]'" in said_of_spark(path, "import sys; sys.modules['pyspark'] = None")


def test_without_java_that_is_said(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    without = (
        f"import os; os.environ.pop('SPARK_REMOTE', None); os.environ['JAVA_HOME'] = {str(tmp_path / 'nowhere')!r}"
    )
    assert "Spark needs Java 17 or newer" in said_of_spark(path, without)


def said_of_spark(path: Path, before: str) -> str:
    """What a process says that has not asked Spark for anything yet; this one may have a session."""
    script = f"""
{before}
from ampscope import open_run
from ampscope.errors import EngineError
try:
    open_run({str(path)!r}, engine="spark")
except EngineError as error:
    print(error)
"""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


def test_what_is_no_session_is_refused(path: Path) -> None:
    pytest.importorskip("pyspark")
    with pytest.raises(EngineError, match="is no engine"):
        open_run(path, engine=3)
