"""The server loads what the first page needs before somebody asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.scenes import overflow

pytest.importorskip("streamlit", reason="needs the app's packages")


def printed(program: str, *arguments: str) -> str:
    """What a program prints that can import the app."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        cwd=ROOT / "app",
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "app")))},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_all_that_takes_long_is_loaded() -> None:
    program = (
        "import sys, streamlit_app as entry; entry.load_packages(); entry.load_results(); "
        "print(*(name for name in sys.argv[1:] if name not in sys.modules))"
    )
    heavy = ("ampscope.analysis.diagnosis.diagnosis", "ampscope.report.html.report_page", "duckdb", "plotly")
    assert printed(program, *heavy) == ""


def test_a_verdict_and_the_list_of_runs_do_without_pandas(run_folder: Path) -> None:
    overflow(run_folder).close()
    program = (
        "import importlib, pathlib, sys, streamlit_app as entry; "
        "[importlib.import_module(name) for name in entry.FIRST_PAGE]; "
        "from ampscope import diagnose; from ampscope.analysis.overview.run_list import run_summaries; "
        "path = pathlib.Path(sys.argv[1]); listed = run_summaries([path])[0]; "
        "print(diagnose(path).verdict, listed.steps, len(listed.loss.steps) > 0, 'pandas' in sys.modules)"
    )
    assert printed(program, str(run_folder)) == "problem 272 True False"
