"""The server loads what the first page needs before somebody asks for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytest.importorskip("streamlit", reason="needs the app's packages")


def test_all_that_takes_long_is_loaded() -> None:
    program = (
        "import sys, streamlit_app as entry; entry.load_first_page(); "
        "print(*(name for name in sys.argv[1:] if name not in sys.modules))"
    )
    heavy = ("ampscope.analysis.diagnosis.diagnosis", "ampscope.report.html.report_page", "duckdb", "plotly")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *heavy],
        cwd=ROOT / "app",
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "app")))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == ""
