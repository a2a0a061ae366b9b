"""Where torch is not installed, nor what shows pages, traces are read by every verb; what needs either says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.support.paths import ROOT, SAMPLES

#: What the base install does not bring.
ABSENT = ("torch", "triton", "streamlit", "plotly", "pandas", "safetensors", "mcp", "fsspec", "s3fs", "sklearn")
#: Verbs, and how each ends.
CALLS: dict[str, tuple[list[str], int]] = {
    "diagnose": (["diagnose", "attention-overflow"], 1),
    "diagnose as JSON": (["diagnose", "attention-overflow", "--json"], 1),
    "diagnose a healthy one": (["diagnose", "healthy"], 0),
    "ranges": (["ranges", "attention-overflow"], 0),
    "scale": (["scale", "attention-overflow"], 0),
    "plan": (["plan", "healthy"], 0),
    "audit": (["audit", "healthy"], 0),
    "report": (["report", "attention-overflow", "-o", "report.html"], 0),
    "compare": (["compare", "attention-overflow", "healthy"], 1),
    "runs": (["runs", "."], 0),
    "runs quickly": (["runs", ".", "--quick"], 0),
    "fix": (["fix", "attention-overflow"], 0),
    "gate": (["gate", "attention-overflow", "--max-skipped", "1%"], 1),
    "perfetto": (["perfetto", "attention-overflow"], 0),
    "compact": (["compact", "."], 0),
    "schema": (["schema"], 0),
    "help": (["--help"], 0),
    "view": (["view", "healthy"], 2),
    "mcp": (["mcp", "."], 2),
    "demo": (["demo"], 2),
}
PROGRAM = """
import contextlib, io, json, sys

absent, calls = json.loads(sys.argv[1])


class Without:
    def __init__(self, finder):
        self._finder = finder

    def __getattr__(self, name):
        return getattr(self._finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in absent else self._finder.find_spec(name, path, target)


sys.meta_path[:] = map(Without, sys.meta_path)
from ampscope.cli.main import main

ends = {}
for name, arguments in calls.items():
    sys.argv = ["ampscope", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"
    ends[name] = [code, out.getvalue(), err.getvalue()]
import ampscope
for name in ("watch", "GradScaler", "autocast", "keep_fp32"):
    try:
        getattr(ampscope, name)
    except Exception as error:
        ends[name] = [f"{type(error).__name__}", "", str(error)]
with ampscope.open_run("healthy") as run:
    ends["steps"] = [0, str(len(run.steps.collect())), ampscope.diagnose(run).verdict]
ends["loaded"] = [0, " ".join(name for name in absent if name in sys.modules), ""]
sys.__stdout__.write(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    work = tmp_path_factory.mktemp("samples")
    for run in ("attention-overflow", "healthy"):
        shutil.copytree(SAMPLES / run, work / run)
    asked = json.dumps([ABSENT, {name: arguments for name, (arguments, _) in CALLS.items()}])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    command = [sys.executable, "-c", PROGRAM, asked]
    answer = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    found: dict[str, Any] = json.loads(answer.stdout)
    assert (work / "report.html").stat().st_size > 10_000
    return found


@pytest.mark.parametrize("name", CALLS)
def test_a_verb(name: str, ends: dict[str, Any]) -> None:
    code, out, err = ends[name]
    assert code == CALLS[name][1], err
    assert out or err


@pytest.mark.parametrize(("name", "extra"), [("view", "app"), ("demo", "torch"), ("mcp", "mcp")])
def test_what_needs_more_names_it(name: str, extra: str, ends: dict[str, Any]) -> None:
    assert f"ampscope[{extra}]" in ends[name][2] or "ampscope[all]" in ends[name][2]


@pytest.mark.parametrize("name", ["watch", "GradScaler", "autocast", "keep_fp32"])
def test_what_trains_names_it(name: str, ends: dict[str, Any]) -> None:
    assert "ampscope[torch]" in ends[name][2]


def test_a_run_is_opened_from_python(ends: dict[str, Any]) -> None:
    assert ends["steps"] == [0, "116", "healthy"]
    assert ends["loaded"][1] == ""
