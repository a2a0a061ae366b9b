"""What the package and the command offer is pinned, and importing them loads no more than is promised."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer.main

import ampscope
from tests.support.paths import ROOT, modules

HEAVY = ("torch", "plotly", "streamlit", "duckdb", "narwhals", "pandas", "pyarrow", "typer")
NOT_IN_TRAINING = ("duckdb", "narwhals", "plotly", "streamlit", "pandas")


def loaded(code: str, names: tuple[str, ...]) -> list[str]:
    """Which of ``names`` a fresh interpreter has loaded after it ran ``code``."""
    ask = f"{code}\nimport sys\nsys.__stdout__.write(' '.join(n for n in {names!r} if n in sys.modules))"
    answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True, cwd=ROOT)
    return answer.stdout.split()


def modules_of(*rooms: str) -> str:
    """Code that imports every module of the rooms."""
    names = [name for name in modules() if name.startswith(tuple(f"ampscope.{room}." for room in rooms))]
    return "\n".join(f"import {name}" for name in names)


def test_the_front_door_is_light() -> None:
    assert loaded("import ampscope; dir(ampscope); ampscope.errors", HEAVY) == []


def test_help_is_light() -> None:
    code = "import sys; sys.argv = ['ampscope', '--help']\nfrom ampscope.cli.main import main\n"
    code += (
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): main()"
    )
    assert loaded(code, ("torch", "plotly", "streamlit", "duckdb")) == []


def test_reading_loads_no_torch() -> None:
    assert loaded(modules_of("trace", "cures", "analysis", "report", "cli"), ("torch", "streamlit", "plotly")) == []


def test_training_loads_no_reader() -> None:
    assert loaded(modules_of("capture"), NOT_IN_TRAINING) == []


def test_a_broken_import_promise_is_found() -> None:
    assert loaded("import ampscope.trace.read.run", NOT_IN_TRAINING)
    assert loaded("import ampscope.capture.watch", HEAVY)


def test_the_front_door_offers() -> None:
    assert sorted(ampscope.__all__) == [
        "Alert",
        "GradScaler",
        "Healing",
        "Run",
        "Scope",
        "__version__",
        "autocast",
        "diagnose",
        "errors",
        "keep_fp32",
        "open_run",
        "watch",
    ]
    assert dir(ampscope) == sorted(ampscope.__all__)
    for name in ampscope.__all__:
        assert getattr(ampscope, name) is not None
    with pytest.raises(AttributeError, match="it offers Alert, GradScaler, Healing, Run"):
        ampscope.wacht  # noqa: B018  # the lookup is the test


def test_the_command_offers() -> None:
    from ampscope.cli.main import app

    command = typer.main.get_command(app)
    verbs = [
        "audit",
        "compact",
        "compare",
        "demo",
        "diagnose",
        "fix",
        "fleet",
        "gate",
        "mcp",
        "perfetto",
        "plan",
        "ranges",
        "report",
        "repro",
        "runs",
        "scale",
        "schema",
        "upload",
        "verify",
        "view",
    ]
    assert sorted(command.commands) == verbs  # type: ignore[attr-defined]  # a group
