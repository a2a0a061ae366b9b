from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.support.paths import APP

_RUN = """
import sys
from streamlit.testing.v1 import AppTest
test = AppTest.from_file(sys.argv[1], default_timeout=60).run()
assert not test.exception, test.exception
print(test.title[0].value)
"""


def test_the_app_runs_from_where_a_wheel_puts_it(tmp_path: Path) -> None:
    copy = shutil.copytree(APP, tmp_path / "site" / "_app", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(APP.parent), "AMPSCOPE_RUNS": str(tmp_path)}
    command = [sys.executable, "-c", _RUN, str(copy / "workbench.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "No run yet", done.stderr


def test_the_app_listens_to_this_machine_alone_and_reports_to_nobody() -> None:
    settings = tomllib.loads((APP / ".streamlit" / "config.toml").read_text())
    assert settings["server"]["address"] == "localhost"
    assert settings["browser"]["gatherUsageStats"] is False
    assert settings["client"]["showErrorLinks"] is False
