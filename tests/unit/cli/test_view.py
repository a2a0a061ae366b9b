"""``ampscope view``: how the app is started."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ampscope as package
from ampscope.cli import view
from ampscope.errors import AmpscopeError
from tests.support.command import Command


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were started instead of a server."""
    commands: list[list[str]] = []

    def call(command: list[str]) -> int:
        commands.append(command)
        return 0

    monkeypatch.setattr(subprocess, "call", call)
    return commands


def test_serves_the_folder_to_this_machine_alone(ampscope: Command, started: list[list[str]], tmp_path: Path) -> None:
    assert ampscope("view", tmp_path, "--port", 8600).code == 0
    (command,) = started
    assert command[:4] == [sys.executable, "-m", "streamlit", "run"]
    assert Path(command[4]) == Path(package.__file__).parent.parent / "app" / "streamlit_app.py"
    assert "--server.address=localhost" in command
    assert "--server.port=8600" in command
    assert "--browser.gatherUsageStats=false" in command
    assert command[-2:] == ["--", str(tmp_path.resolve())]


def test_without_a_folder_the_app_looks_itself(ampscope: Command, started: list[list[str]]) -> None:
    ampscope("view")
    assert started[0][-1] == "--"


def test_without_a_port_it_takes_a_free_one(ampscope: Command, started: list[list[str]]) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        first = taken.getsockname()[1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(view, "_PORT", first)
            ampscope("view")
    (port,) = (int(part.partition("=")[2]) for part in started[0] if "server.port" in part)
    assert first < port < first + 100


LOGIN = {"SSH_CONNECTION": "10.0.0.7 50022 10.0.0.1 22"}


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        (LOGIN, "ssh -N -L 8600:localhost:8600 ann@box"),
        ({"SSH_CONNECTION": "10.0.0.7 50022 10.0.0.1 2222"}, "ssh -N -L 8600:localhost:8600 -p 2222 ann@box"),
        ({**LOGIN, "SLURM_SUBMIT_HOST": "login1"}, "ssh -N -L 8600:localhost:8600 -J ann@login1 ann@box"),
        ({**LOGIN, "SLURM_SUBMIT_HOST": "box"}, "ssh -N -L 8600:localhost:8600 ann@box"),
        ({"SSH_CONNECTION": "cut off"}, "ssh -N -L 8600:localhost:8600 ann@box"),
    ],
)
def test_the_way_home_is_one_line_and_an_address(environment: dict[str, str], line: str) -> None:
    words = view.way_home(8600, environment, user="ann", host="box")
    assert f"\n  {line}\n" in words
    assert "http://localhost:8600" in words


def test_the_way_home_is_printed_where_there_is_no_browser(
    ampscope: Command, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", LOGIN["SSH_CONNECTION"])
    assert "ssh -N -L 8600:localhost:8600 " in ampscope("view", "--port", 8600).out
    assert {"--server.headless=true", "--logger.hideWelcomeMessage=true"} <= set(started[0])
    monkeypatch.delenv("SSH_CONNECTION")
    monkeypatch.setenv("DISPLAY", ":0")
    assert "ssh" not in ampscope("view", "--port", 8600).out
    assert {"--server.headless=true", "--logger.hideWelcomeMessage=true"}.isdisjoint(started[1])


def test_a_folder_that_is_not_there(ampscope: Command, started: list[list[str]], tmp_path: Path) -> None:
    answer = ampscope("view", tmp_path / "gone")
    assert answer.code == 2
    assert "does not exist" in answer.err
    assert not started


def test_without_streamlit_it_names_the_extra(ampscope: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "streamlit" else object())
    answer = ampscope("view")
    assert answer.code == 2
    assert answer.err == "ampscope: the app needs streamlit; install it with: pip install 'ampscope[app]'\n"


def test_ctrl_c_is_how_it_ends(ampscope: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(command: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "call", interrupt)
    assert ampscope("view").code == 0


def test_a_server_that_fails(ampscope: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "call", lambda command: 1)
    answer = ampscope("view", "--port", 8600)
    assert answer.code == 2
    assert answer.err == "ampscope: the app's server stopped with exit code 1; its own message is above\n"


def test_in_a_wheel_the_app_is_inside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inside = tmp_path / "ampscope" / "_app"
    inside.mkdir(parents=True)
    (inside / "streamlit_app.py").touch()
    monkeypatch.setattr(package, "__file__", str(tmp_path / "ampscope" / "__init__.py"))
    assert view.app_folder() == inside


def test_an_installation_without_the_app(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(package, "__file__", str(tmp_path / "ampscope" / "__init__.py"))
    with pytest.raises(AmpscopeError, match="reinstall"):
        view.app_folder()


def test_streamlit_knows_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", LOGIN["SSH_CONNECTION"])
    options: Any = pytest.importorskip("streamlit.config").get_config_options()
    for flag in (part for part in view.command(tmp_path, 8501) if part.startswith("--") and "=" in part):
        assert flag[2:].partition("=")[0] in options
