"""An engine that cannot be had is told with what to do."""

from __future__ import annotations

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


def test_without_pyspark_the_extra_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("ampscope.trace.read.spark")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(EngineError, match=r"pip install 'ampscope\[spark\]'"):
        open_run(path, engine="spark")


def test_without_java_that_is_said(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.delenv("SPARK_REMOTE", raising=False)
    with pytest.raises(EngineError, match="Spark needs Java 17 or newer"):
        open_run(path, engine="spark")


def test_what_is_no_session_is_refused(path: Path) -> None:
    pytest.importorskip("pyspark")
    with pytest.raises(EngineError, match="is no engine"):
        open_run(path, engine=3)
