"""README and guides promise only what there is."""

from __future__ import annotations

import inspect
import re

import pytest
import typer.main

import ampscope
from ampscope.capture.record.signals import LiveFigures
from ampscope.cli.main import app
from ampscope.trace.read.run import Run
from ampscope.trace.schema import ReplayStatus, Table
from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text("utf-8")
DOCS = ROOT / "docs"
COMMANDS, HOW = ((DOCS / name).read_text("utf-8") for name in ("run/commands.md", "reference/how-it-works.md"))
PAGES = sorted(page for page in DOCS.rglob("*.md") if page.name != "api.md")
#: All that a user reads.
GUIDES = "\n".join([README, *(page.read_text("utf-8") for page in PAGES)])


def test_commands_exist() -> None:
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # a group
    named = set(re.findall(r"^ampscope +(\w+)", COMMANDS, re.MULTILINE))
    assert named == set(verbs)
    told = set(re.findall(r"^ampscope +(\w+)|`ampscope (\w+)", GUIDES, re.MULTILINE))
    assert {one or other for one, other in told} <= set(verbs)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = set(re.findall(r"^make ([\w-]+)|`make ([\w-]+)", GUIDES, re.MULTILINE))
    assert {one or other for one, other in named} <= targets


def test_the_tables_are_these() -> None:
    listed = HOW.partition("The tables are ")[2].partition(";")[0]
    assert re.findall(r"`(\w+)`", listed) == [table.value for table in Table]


def test_the_replay_states_are_these() -> None:
    told = HOW.partition("is checked, and told:")[2].partition(". ")[0]
    assert re.findall(r"`(\w+)`", told) == [status.value for status in ReplayStatus]


def test_files_it_names_exist() -> None:
    figures = set(LiveFigures(1, 0.0, 1.0, 0.0, 1.0, 1.0).by_name())  # in a framework's own log
    for name in set(re.findall(r"`((?:ampscope|tests|app|sample_logs)/[\w./]*)`", GUIDES)) - figures:
        assert (ROOT / name).exists(), name


def test_python_it_shows_is_the_api() -> None:
    for name in re.findall(r"ampscope\.(\w+)\(", GUIDES):
        assert name in ampscope.__all__, name
    for name in set(re.findall(r"\brun\.(\w+)\b", GUIDES)) - {"json", "md", "txt"}:
        assert hasattr(Run, name), name
    parameters = set(inspect.signature(ampscope.watch).parameters)
    assert set(re.findall(r"`(\w+)=\w?`", README + HOW)) <= parameters
    for name in set(re.findall(r"\bscope\.(\w+)\(", GUIDES)):
        assert hasattr(ampscope.Scope, name), name


@pytest.mark.parametrize("name", ["demo/gpt.py"])
def test_the_line_it_quotes_is_where_it_says(name: str) -> None:
    quoted = re.search(rf"ampscope/{name}:(\d+) in .*\n +(.*)\n", README)
    assert quoted is not None
    line = (ROOT / "ampscope" / name).read_text("utf-8").splitlines()[int(quoted[1]) - 1]
    assert line.strip() == quoted[2]
