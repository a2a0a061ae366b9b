"""A changed file is what one command's programs read, however they load it; the file itself stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ampscope.cli.verify import Overlay, named_python

PROGRAM = '''"""Says what it is."""
from __future__ import annotations
import os, sys
import beside

WORD = "old"
print(WORD, __name__, os.path.basename(__file__), sys.argv[1:], beside.NAME, __doc__)
'''


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "part.py").write_text(PROGRAM)
    (folder / "beside.py").write_text("NAME = 'beside'\n")
    (folder / "main.py").write_text("import part\nprint(part.WORD)\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def overlay(project: Path, tmp_path: Path) -> Overlay:
    folder = tmp_path / "overlay"
    folder.mkdir()
    return Overlay(folder, project / "part.py", PROGRAM.replace("old", "new").encode())


def said(overlay: Overlay, project: Path, *command: str, **environment: str) -> str:
    run = subprocess.run(
        overlay.command([sys.executable, *command]),
        env=overlay.environment({**os.environ, **environment}),
        cwd=project,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr == ""
    return run.stdout


def test_a_program_runs_as_itself(overlay: Overlay, project: Path) -> None:
    assert said(overlay, project, "part.py", "--lr", "1") == (
        "new __main__ part.py ['--lr', '1'] beside Says what it is.\n"
    )
    assert overlay.was_read


@pytest.mark.parametrize("command", [("-m", "part"), ("./part.py",)])
def test_it_may_be_called_otherwise(overlay: Overlay, project: Path, command: tuple[str, ...]) -> None:
    assert said(overlay, project, *command).startswith("new __main__ part.py [] beside")


def test_an_import_finds_it_although_the_old_one_was_compiled(overlay: Overlay, project: Path) -> None:
    subprocess.run([sys.executable, "main.py"], cwd=project, capture_output=True, check=True)
    assert said(overlay, project, "main.py").startswith("new part part.py [] beside")
    again = subprocess.run([sys.executable, "main.py"], cwd=project, capture_output=True, text=True, check=True)
    assert again.stdout.startswith("old part part.py")
    assert (project / "part.py").read_text() == PROGRAM


def test_a_program_that_does_not_load_it_is_told(overlay: Overlay, project: Path) -> None:
    assert said(overlay, project, "beside.py") == ""
    assert not overlay.was_read


def test_what_a_machine_runs_at_the_start_still_runs(overlay: Overlay, project: Path, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('hello')\n")
    told = said(overlay, project, "main.py", PYTHONPATH=str(tmp_path / "site"))
    assert told.startswith("hello\nnew part")


def test_a_plain_python_is_this_one() -> None:
    assert named_python(["python", "train.py"]) == [sys.executable, "train.py"]
    assert named_python(["torchrun", "train.py"]) == ["torchrun", "train.py"]
