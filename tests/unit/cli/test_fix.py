"""``ampscope fix``: the change that it shows, and that it makes no other."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampscope.trace.schema import Change, Form, Trial, Trigger
from tests.support.command import Command
from tests.support.trace_builder import TraceBuilder
from tests.support.traced_steps import Step

CODE = "loss = -p.log().mean()"
PROGRAM = f"def loss_of(p):\n    {CODE}\n    return loss\n"
CHANGED = PROGRAM.replace("p.log()", "p.clamp(min=1e-4).log()")
Recorded = Callable[..., Path]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    """A run that failed at a logarithm of zero, which a bound of its operand cured."""

    def record(**form: Any) -> Path:
        place = {"form_file": "train.py", "form_line": 2, "form_function": "loss_of", "form_code": CODE}
        trace = TraceBuilder(tmp_path / "run")
        trace.step(skipped=True, found_inf=True)
        trace.incident(trigger=Trigger.NONFINITE_LOSS)
        step = Step(trace)
        given = step.entry(name="p", out=(0.0, 1.0), zeros=1)
        step.loss(step.op("log", given, out=(-math.inf, 0.0), file="train.py", line=2, code=CODE))
        trace.replay(Change.FP32, Trial.NONFINITE)
        columns = {"form": Form.OPERAND_BOUND, "form_call": "log", "form_argument": 0, "form_value": 1e-4, **place}
        trace.replay(Change.FORM, **{"outcome": Trial.FINITE, **columns, **form})
        return trace.close()

    return record


def files(root: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(root.iterdir())}


def test_the_change_is_shown_and_not_made(ampscope: Command, root: Path, recorded: Recorded) -> None:
    answer = ampscope("fix", recorded())
    assert answer.code == 0
    assert answer.out.splitlines()[:2] == ["--- a/train.py", "+++ b/train.py"]
    assert f"-    {CODE}\n+    loss = -p.clamp(min=1e-4).log().mean()\n" in answer.out
    assert "It was tried on the step, and cures it." in answer.err
    assert files(root) == {"train.py": PROGRAM}


def test_it_is_made_when_asked_for_and_the_old_file_kept(ampscope: Command, root: Path, recorded: Recorded) -> None:
    (root / "train.py.bak").write_text("kept from before")
    (root / "train.py").chmod(0o750)
    assert ampscope("fix", recorded(), "--apply").code == 0
    assert files(root) == {"train.py": CHANGED, "train.py.bak": "kept from before", "train.py.bak1": PROGRAM}
    assert (root / "train.py").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize(("outcome", "code"), [(Trial.FINITE, 0), (Trial.NONFINITE, 2)])
def test_that_a_file_has_been_changed_is_told(
    ampscope: Command, root: Path, recorded: Recorded, outcome: Trial, code: int
) -> None:
    run = recorded(outcome=outcome)
    (root / "train.py").write_text(CHANGED)
    answer = ampscope("fix", run)
    assert answer.code == code
    assert "train.py:2 no longer reads as it was recorded (it may have been mended already)" in " ".join(
        answer.err.split()
    )
    assert "train with it and diagnose the new run" in " ".join(answer.err.split())


def test_the_root_is_where_the_program_lies(
    ampscope: Command, root: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ampscope("fix", recorded(), "--apply").code == 2
    assert ampscope("fix", "run", "--apply", "--root", root).code == 0
    assert files(root)["train.py"] == CHANGED


@pytest.mark.parametrize(
    "content",
    [
        PROGRAM.replace("\n", "\r\n").encode(),
        PROGRAM.encode("utf-8-sig"),
        PROGRAM.replace("p):", "p):  # ä").replace("def", "# coding: latin-1\ndef").encode("latin-1"),
        PROGRAM.replace("    ", "\t").encode(),
        PROGRAM.replace("    loss", "\f    loss").encode(),
        PROGRAM.replace("return loss\n", "return loss  ").encode(),
        PROGRAM.replace("def", "NAME = 'a\u2028b\x0b'\ndef").encode(),
    ],
    ids=["crlf", "bom", "latin-1", "tabs", "form feed", "no end", "separators"],
)
def test_nothing_else_in_the_file_changes(ampscope: Command, root: Path, recorded: Recorded, content: bytes) -> None:
    (root / "train.py").write_bytes(content)
    line = content.split(b"p.log()")[0].count(b"\n") + 1
    assert ampscope("fix", recorded(form_line=line), "--apply").code == 0
    assert (root / "train.py").read_bytes() == content.replace(b"p.log()", b"p.clamp(min=1e-4).log()")
    assert (root / "train.py.bak").read_bytes() == content


def test_a_file_that_is_read_only_stays(ampscope: Command, root: Path, recorded: Recorded) -> None:
    (root / "train.py").chmod(0o444)
    answer = ampscope("fix", recorded(), "--apply")
    assert (answer.code, files(root)) == (2, {"train.py": PROGRAM})
    assert "it is read-only; nothing was changed" in answer.err


def test_a_line_that_reads_otherwise_stays(ampscope: Command, root: Path, recorded: Recorded) -> None:
    run = recorded()
    (root / "train.py").write_text(PROGRAM.replace("mean", "sum"))
    answer = ampscope("fix", run, "--apply")
    assert answer.code == 2
    assert "train.py:2 does not read as it was recorded" in answer.err
    assert files(root) == {"train.py": PROGRAM.replace("mean", "sum")}


def test_it_is_not_made_twice(ampscope: Command, root: Path, recorded: Recorded) -> None:
    run = recorded()
    assert ampscope("fix", run, "--apply").code == 0
    assert ampscope("fix", run, "--apply").code == 2
    assert files(root) == {"train.py": CHANGED, "train.py.bak": PROGRAM}


@pytest.mark.parametrize(
    "name", ["../outside.py", "{tmp}/outside.py", "link.py", "gone.py", "/etc/passwd", "train.txt"]
)
def test_nothing_outside_the_root_is_changed(
    ampscope: Command, root: Path, recorded: Recorded, tmp_path: Path, name: str
) -> None:
    (tmp_path / "outside.py").write_text(PROGRAM)
    (root / "link.py").symlink_to(tmp_path / "outside.py")
    (root / "train.txt").write_text(PROGRAM)
    before = files(root)
    answer = ampscope("fix", recorded(form_file=name.format(tmp=tmp_path)), "--apply")
    assert (answer.code, files(root)) == (2, before)
    assert (tmp_path / "outside.py").read_text() == PROGRAM
    assert "nothing was changed" in answer.err


@pytest.mark.parametrize(
    "form",
    [
        {"form_file": "train.py\n+++ b/other.py"},
        {"form_code": f"{CODE}\nimport os"},
        {"form_code": f"{CODE}\x1b[2J"},
        {"form_code": f"{CODE}; import os"},
        {"form_call": "log; import os"},
        {"form_line": -5},
        {"form_line": 2**31 - 1},
        {"form_code": f"{CODE}  # " + "x" * 100_000},
        {"form_code": "loss = -p.log("},
        {"form_code": "-" * 3_000 + "p.log()"},
        {"form_value": math.nan},
        {"form_value": None},
    ],
    ids=str,
)
def test_a_hostile_trace_writes_nothing_of_its_own(
    ampscope: Command, root: Path, recorded: Recorded, form: dict[str, Any]
) -> None:
    answer = ampscope("fix", recorded(**form), "--apply")
    assert (answer.code, files(root)) == (2, {"train.py": PROGRAM})
    assert "\x1b" not in answer.out + answer.err


@pytest.mark.parametrize("name", ["pipe.py", "site-packages/train.py", "folder.py"])
def test_what_is_no_file_of_ones_own_is_not_opened(
    ampscope: Command, root: Path, recorded: Recorded, name: str
) -> None:
    os.mkfifo(root / "pipe.py")
    (root / "folder.py").mkdir()
    (root / "site-packages").mkdir()
    (root / "site-packages" / "train.py").write_text(PROGRAM)
    answer = ampscope("fix", recorded(form_file=name), "--apply")
    assert answer.code == 2
    assert "is no file of Python source" in answer.err
    assert (root / "site-packages" / "train.py").read_text() == PROGRAM


def test_a_form_that_nobody_knows_leaves_general_advice(ampscope: Command, root: Path, recorded: Recorded) -> None:
    answer = ampscope("fix", recorded(form="rm -rf"), "--apply")
    assert "It was not tried." in answer.err
    assert files(root) == {"train.py": CHANGED, "train.py.bak": PROGRAM}


def test_a_remedy_is_chosen_by_its_number(ampscope: Command, root: Path, recorded: Recorded) -> None:
    run = recorded()
    assert ampscope("fix", run, "--remedy", 1).code == 0
    second, none = ampscope("fix", run, "--remedy", 2), ampscope("fix", run, "--remedy", 99)
    assert (second.code, none.code) == (2, 2)
    assert "remedy 2 can" in second.err
    assert "there is no remedy 99" in none.err


def test_a_cure_that_failed_is_not_offered(ampscope: Command, root: Path, recorded: Recorded) -> None:
    assert ampscope("fix", recorded(outcome=Trial.NONFINITE)).code == 2


def test_a_healthy_run_has_nothing_to_fix(ampscope: Command, root: Path, run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.step()
    answer = ampscope("fix", trace.close())
    assert answer.code == 2
    assert "there is nothing to fix" in answer.err
