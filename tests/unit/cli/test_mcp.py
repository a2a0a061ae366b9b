"""The server for assistants, asked by the protocol's own client."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from mcp import Client, StdioServerParameters
from mcp_types import CallToolResult, TextContent

from ampscope.cli.mcp_queries import MOST_CHARACTERS, answer, answer_apart
from ampscope.cli.mcp_server import Folders, server_of
from ampscope.errors import AmpscopeError, RunNotFound
from tests.support.command import Command
from tests.support.coroutines import ran
from tests.support.paths import ROOT, SAMPLES

RUN = SAMPLES / "attention-overflow"
T = TypeVar("T")


def asked(server: Any, question: Callable[[Client], Awaitable[T]]) -> T:
    """What a client hears."""

    async def ask() -> T:
        async with Client(server) as client:
            return await question(client)

    return ran(ask())


def called(tool: str, **arguments: Any) -> tuple[bool, str]:
    """Whether a tool refused, and its answer."""
    told = asked(server_of([SAMPLES]), lambda client: client.call_tool(tool, arguments))
    return bool(told.is_error), text_of(told)


def text_of(told: CallToolResult) -> str:
    """An answer's text."""
    return "".join(each.text for each in told.content if isinstance(each, TextContent))


def test_every_tool_says_what_it_does_and_that_it_only_reads() -> None:
    tools = asked(server_of([SAMPLES]), lambda client: client.list_tools()).tools
    assert {tool.name for tool in tools} == {
        "list_runs",
        "diagnose",
        "ranges",
        "scale",
        "compare",
        "tables",
        "query",
    }
    assert all(tool.description and tool.annotations and tool.annotations.read_only_hint for tool in tools)


def test_a_run_is_found_and_diagnosed() -> None:
    refused, text = called("list_runs", search="attention")
    assert not refused
    [run] = json.loads(text)["runs"]
    assert (run["run"], run["status"]) == ("attention-overflow", "closed")
    refused, text = called("diagnose", run=run["run"])
    assert (refused, text.startswith("PROBLEM  attention-overflow")) == (False, True)
    assert "bmm" in text
    assert json.loads(called("diagnose", run=run["run"], form="json")[1])["verdict"] == "problem"


@pytest.mark.parametrize(
    ("tool", "arguments", "key"),
    [
        ("ranges", {"run": "healthy", "closest": 3}, "rows"),
        ("scale", {"run": "healthy"}, "judgement"),
        ("compare", {"a": "healthy@0", "b": "healthy@1"}, "differences"),
        ("tables", {}, "ops"),
    ],
)
def test_every_other_tool_answers(tool: str, arguments: dict[str, Any], key: str) -> None:
    refused, text = called(tool, **arguments)
    assert not refused, text
    assert key in json.loads(text)


def test_rows_come_by_sql() -> None:
    refused, text = called("query", run="healthy", sql="SELECT step, loss FROM steps ORDER BY step", limit=2)
    assert not refused
    found = json.loads(text)
    assert (found["columns"], [row[0] for row in found["rows"]], found["more"]) == (["step", "loss"], [0, 1], True)


@pytest.mark.parametrize(
    "sql",
    [
        "DROP TABLE steps",
        "COPY steps TO '{folder}/stolen.csv'",
        "INSERT INTO steps SELECT * FROM steps",
        "SELECT 1; SELECT 2",
        "SET enable_external_access = true",
        "SELECT * FROM read_text('/etc/hostname')",
        "SELECT * FROM read_text('{other}/run.json')",
        "ATTACH '{folder}/more.db'",
        "INSTALL httpfs",
        "SELEKT",
        "",
    ],
)
def test_nothing_but_reading_this_run_is_possible(tmp_path: Path, sql: str) -> None:
    run = shutil.copytree(SAMPLES / "healthy", tmp_path / "run")
    before = sorted(path.relative_to(run) for path in run.rglob("*"))
    with pytest.raises(AmpscopeError, match=r"the query is wrong|one SELECT can be asked"):
        answer(run, sql.format(folder=run, other=RUN), rows=10)
    assert sorted(path.relative_to(run) for path in run.rglob("*")) == before


def test_a_query_without_end_is_given_up() -> None:
    endless = "SELECT count(*) FROM range(100000000000) a, range(100000) b WHERE a.range * b.range % 7 = 3"
    with pytest.raises(AmpscopeError, match="took longer"):
        answer(RUN, endless, rows=1, seconds=0.2)


def test_a_query_that_hears_of_no_end_ends_with_its_process() -> None:
    deaf = "SELECT levenshtein(repeat('ab', 300000), repeat('ba', 300000))"
    before = time.monotonic()
    with pytest.raises(AmpscopeError, match="took longer"):
        answer_apart(RUN, deaf, rows=1, seconds=0.1, around=5.0)
    assert time.monotonic() - before < 60


def test_a_process_of_its_own_tells_the_same(tmp_path: Path) -> None:
    sql = "SELECT step, 'nan'::DOUBLE FROM steps ORDER BY step"
    assert answer_apart(RUN, sql, rows=2) == answer(RUN, sql, rows=2)
    with pytest.raises(AmpscopeError, match="the query is wrong"):
        answer_apart(RUN, f"SELECT * FROM read_text('{tmp_path / 'x'}')", rows=2)


@pytest.mark.parametrize("sql", ["SELECT repeat('x', 1100000)", "SELECT list(range) FROM range(400000)"])
def test_an_answer_that_nobody_reads_is_refused(sql: str) -> None:
    with pytest.raises(AmpscopeError, match=f"characters, of {MOST_CHARACTERS:,}"):
        answer(RUN, sql, rows=1)


@pytest.mark.parametrize(
    "sql",
    [
        "FROM query('COPY (SELECT 1) TO ''{folder}/stolen.csv''')",
        "WITH x AS (INSERT INTO steps SELECT * FROM steps RETURNING *) SELECT * FROM x",
        "SELECT * FROM read_text('{folder}/link')",
        "SELECT * FROM read_text('{folder}/../runs/a')",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM duckdb_secrets()",
        "SELECT * FROM enable_logging()",
        "SELECT * FROM read_blob('http://127.0.0.1:9/x')",
    ],
)
def test_no_way_around(tmp_path: Path, sql: str) -> None:
    run = shutil.copytree(SAMPLES / "healthy", tmp_path / "run")
    (run / "link").symlink_to("/etc/hostname")
    before = sorted(path.relative_to(run) for path in run.rglob("*"))
    with pytest.raises(AmpscopeError, match="the query is wrong"):
        answer(run, sql.format(folder=run), rows=10)
    assert sorted(path.relative_to(run) for path in run.rglob("*")) == before


def test_values_that_json_lacks_are_strings() -> None:
    found = answer(RUN, "SELECT 'nan'::FLOAT, '-inf'::FLOAT, DATE '2026-01-01', 'a'::BLOB", rows=1)
    assert found["rows"] == [["NaN", "-Infinity", "2026-01-01", "1 bytes"]]


class TestFolders:
    def test_a_run_elsewhere_is_not_found(self, tmp_path: Path) -> None:
        inside = shutil.copytree(SAMPLES / "healthy", tmp_path / "runs" / "inside")
        (tmp_path / "runs" / "link").symlink_to(RUN)
        folders = Folders([tmp_path / "runs"])
        assert folders.run("inside") == folders.run(str(inside)) == inside
        for name in (str(RUN), "../../" + RUN.name, "link", "nothing", "in\0side"):
            with pytest.raises(RunNotFound, match="list_runs names them"):
                folders.run(name)
        assert folders.runs() == [inside]

    def test_an_error_is_the_answer(self) -> None:
        refused, text = called("diagnose", run="nothing")
        assert refused
        assert "There is no run 'nothing' below" in text


def test_the_command_serves_an_editor() -> None:
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "ampscope", "mcp", str(SAMPLES)], env={"PYTHONPATH": str(ROOT)}
    )
    told = asked(server, lambda client: client.call_tool("diagnose", {"run": "healthy"}))
    assert text_of(told).startswith("HEALTHY  healthy")


def test_a_folder_that_is_not_there_is_an_error(ampscope: Command, tmp_path: Path) -> None:
    answer = ampscope("mcp", tmp_path / "none")
    assert (answer.code, "there is no folder" in answer.err) == (2, True)
