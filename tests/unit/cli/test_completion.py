"""Completion: what a shell is told when a key asks for more, and how little is loaded for that."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ampscope.cli import run_argument
from ampscope.trace.schema import MANIFEST
from tests.support.command import Command
from tests.support.paths import ROOT

RUNS = ("ampscope_runs/gpt", "ampscope_runs/my run", "ampscope_runs/sweep/lr=0.1", "elsewhere/other")
HOSTILE = ("$(touch pwned)", "`id`", "a;b", "a'b", 'a"b', "a\\b", "a\nb", "a*", "a&b", "a|b", "<a>", "!!", "a#b")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for run in RUNS:
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / MANIFEST).write_text("{}")
    (tmp_path / "ampscope_runs" / "no run").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Shell:
    """Asks as the scripts of bash, zsh and fish do."""

    def __init__(self, ampscope: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ampscope = ampscope
        self._monkeypatch = monkeypatch

    def bash(self, line: str) -> list[str]:
        self._monkeypatch.setenv("_AMPSCOPE_COMPLETE", "complete_bash")
        self._monkeypatch.setenv("COMP_WORDS", line)
        words = line.replace("\\ ", "_").split(" ")
        self._monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        return [line for line in self._ampscope().out.splitlines() if line]  # none makes no word of an empty line

    def of(self, shell: str, line: str) -> str:
        self._monkeypatch.setenv("_AMPSCOPE_COMPLETE", f"complete_{shell}")
        self._monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        self._monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        return self._ampscope().out


@pytest.fixture
def shell(ampscope: Command, monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(ampscope, monkeypatch)


def test_the_manifest_is_known_by_its_name() -> None:
    assert run_argument.MANIFEST == MANIFEST


class TestBash:
    def test_verbs(self, shell: Shell) -> None:
        assert shell.bash("ampscope comp") == ["compare", "compact"]
        assert {"diagnose", "view", "gate"} <= set(shell.bash("ampscope "))

    def test_options(self, shell: Shell) -> None:
        assert shell.bash("ampscope gate --max") == ["--max-skipped"]
        assert "--install-completion" in shell.bash("ampscope --")

    @pytest.mark.parametrize(
        "line",
        [
            "diagnose ",
            "report ",
            "repro ",
            "view ",
            "compact ",
            "fix ",
            "verify ",
            "ranges ",
            "plan ",
            "scale ",
            "audit ",
            "perfetto ",
            "gate ",
            "gate --baseline ",
            "compare ",
            "compare a ",
            "compact ampscope_runs/gpt ",
        ],
    )
    def test_runs(self, line: str, shell: Shell, here: Path) -> None:
        found = shell.bash(f"ampscope {line}")
        assert found == ["ampscope_runs/gpt", "ampscope_runs/my\\ run", "ampscope_runs/sweep/lr=0.1"]

    @pytest.mark.parametrize(
        ("typed", "found"),
        [
            ("ampscope_runs/my\\ r", ["ampscope_runs/my\\ run"]),
            ("./ampscope_runs/g", ["./ampscope_runs/gpt"]),
            ("elsewhere/", ["elsewhere/other"]),
            ("ampscope_runs/sweep/", ["ampscope_runs/sweep/lr=0.1"]),
            ("gone/", []),
            ("e", []),
        ],
    )
    def test_what_is_typed_of_a_run(self, typed: str, found: list[str], shell: Shell, here: Path) -> None:
        assert shell.bash(f"ampscope diagnose {typed}") == found

    def test_a_whole_path(self, shell: Shell, here: Path) -> None:
        assert shell.bash(f"ampscope diagnose {here}/elsewhere/") == [f"{here}/elsewhere/other"]

    def test_without_a_folder_of_runs(self, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert shell.bash("ampscope diagnose ") == []

    def test_schemas(self, shell: Shell) -> None:
        assert shell.bash("ampscope schema com") == ["compare", "compact"]


def test_other_shells_quote_by_themselves(shell: Shell, here: Path) -> None:
    assert shell.of("fish", "ampscope diagnose ").splitlines() == list(RUNS[:3])
    assert '"ampscope_runs/my run"' in shell.of("zsh", "ampscope diagnose ")
    assert shell.of("zsh", "ampscope diagnose gone/").strip() == "_files"


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("asked", ["bash", "zsh", "fish"])
def test_a_name_that_a_shell_could_run_is_not_offered(name: str, asked: str, shell: Shell, here: Path) -> None:
    folder = here / "ampscope_runs" / name
    folder.mkdir()
    (folder / MANIFEST).write_text("{}")
    line = "ampscope diagnose "
    told = "\n".join(shell.bash(line)) if asked == "bash" else shell.of(asked, line)
    assert "gpt" in told
    assert name not in told
    assert told.count("ampscope_runs/") == 3


def _stub(folder: Path) -> Path:
    """The command, wherever this test's interpreter is."""
    command = folder / "bin" / "ampscope"
    command.parent.mkdir()
    command.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from ampscope.cli.main import main\nsys.argv[0] = 'ampscope'\nmain()\n"
    )
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return command.parent


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_in_bash_itself(here: Path) -> None:
    """The script that is installed, sourced, and the function that it defines called as bash does."""
    environment = os.environ | {"PATH": f"{_stub(here)}{os.pathsep}{os.environ['PATH']}"}
    asked = """
        source <(_AMPSCOPE_COMPLETE=source_bash ampscope)
        complete -p ampscope | grep -q -- '-F _ampscope_completion ampscope' || exit 3
        COMP_WORDS=(ampscope diagnose 'ampscope_runs/m'); COMP_CWORD=2
        _ampscope_completion ampscope
        printf '%s\\n' "${COMPREPLY[@]}"
        """
    answer = subprocess.run(
        ["bash", "--norc", "-c", asked], env=environment, cwd=here, capture_output=True, text=True, check=False
    )
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "ampscope_runs/my\\ run\n", "")


def test_next_to_nothing_is_loaded(here: Path) -> None:
    """A key waits for it: on a quiet machine a sixth of a second of the processor."""
    heavy = ("torch", "duckdb", "pyarrow", "numpy", "narwhals", "streamlit", "plotly", "json.tool", "pandas")
    ask = (
        "import sys, atexit; sys.argv = ['ampscope']\n"
        f"atexit.register(lambda: sys.stderr.write(' '.join(n for n in {heavy!r} if n in sys.modules)))\n"
        "from ampscope.cli.main import main; main()"
    )
    asked = {"_AMPSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": "ampscope diagnose ", "COMP_CWORD": "2"}
    environment = os.environ | asked | {"PYTHONPATH": str(ROOT)}
    answer = subprocess.run(
        [sys.executable, "-c", ask], env=environment, cwd=here, capture_output=True, text=True, check=False
    )
    assert (answer.stderr, len(answer.stdout.splitlines())) == ("", 3)
