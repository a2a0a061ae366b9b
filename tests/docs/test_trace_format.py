"""The description of the trace format is that of the schema, leaves nothing out, and its examples run."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from ampscope.trace.schema import Table, arrow_schema
from ampscope.trace.schema.tables import column_meanings
from tests.support.paths import ROOT, SAMPLES
from tests.support.trace_builder import TraceBuilder

DOCS = ROOT / "docs"
GENERATOR: dict[str, Any] = runpy.run_path(str(DOCS / "generate_trace_format.py"))
PAGE = (DOCS / "trace-format.md").read_text("utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
#: The journal of a run whose writer was killed.
KILLED = ROOT / "tests" / "integration" / "samples" / "version_1" / "mistakes"


def test_the_page_is_made_from_the_schema() -> None:
    assert GENERATOR["page"]() == PAGE, "run `make docs`"


@pytest.mark.parametrize("table", Table)
def test_every_column_has_a_meaning(table: Table) -> None:
    said = column_meanings()[table]
    assert list(said) == arrow_schema(table).names
    assert [name for name, meaning in said.items() if not meaning] == []


def test_every_value_has_a_meaning() -> None:
    said: dict[str, dict[str, str]] = GENERATOR["values"]()
    assert [f"{name}.{value}" for name, values in said.items() for value, text in values.items() if not text] == []


def test_every_table_of_a_link_is_there() -> None:
    titles = {"#" + title.lower().replace(" ", "-") for title in re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)}
    assert set(re.findall(r"\]\((#[^)]+)\)", PAGE)) <= titles


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.split()[1])
def test_the_examples_run(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in re.findall(r"^import (\w+)", example, re.MULTILINE):
        pytest.importorskip(name)
    shutil.copytree(SAMPLES / "log-zero", tmp_path / "RUN")
    (journal,) = KILLED.glob("rank=0/steps/journal-*.arrow")
    shutil.copy(journal, tmp_path / "RUN" / "rank=0" / "steps" / "journal-000000.arrow")
    monkeypatch.chdir(tmp_path)
    if "conversion_files" in example:  # of a run under today's version
        shutil.copytree(todays(tmp_path / "today"), tmp_path / "RUN", dirs_exist_ok=True)
    script = tmp_path / "example.py"
    script.write_text(example)
    runpy.run_path(str(script))


def todays(folder: Path) -> Path:
    trace = TraceBuilder(folder)
    trace.replay("fp32", "finite", conversion_files=("a.py",), conversion_lines=(1,), conversion_codes=("x.half()",))
    return trace.close()
