"""A file that is replaced: whole, with what it was beside it, or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ampscope.cli.fix import replaced
from ampscope.errors import AmpscopeError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "a.py").write_bytes(b"old")
    return tmp_path / "a.py"


def held(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(path.parent.iterdir())}


def test_the_file_is_another_and_the_old_one_beside_it(path: Path) -> None:
    (path.parent / "a.py.bak").symlink_to("nowhere")
    assert replaced(path, b"old", b"new").name == "a.py.bak1"
    (path.parent / "a.py.bak").unlink()
    assert held(path) == {"a.py": b"new", "a.py.bak1": b"old"}


def test_a_file_that_has_changed_meanwhile_stays(path: Path) -> None:
    with pytest.raises(AmpscopeError, match="has changed meanwhile"):
        replaced(path, b"older", b"new")
    assert held(path) == {"a.py": b"old"}


def test_a_link_that_has_come_in_its_place_stays(path: Path) -> None:
    target = path.rename(path.with_name("b.py"))
    path.symlink_to(target)
    with pytest.raises(AmpscopeError, match="has changed meanwhile"):
        replaced(path, b"old", b"new")
    assert held(path) == {"a.py": b"old", "b.py": b"old"}
    assert path.is_symlink()


def test_a_file_that_has_gone_is_not_made(path: Path) -> None:
    path.unlink()
    with pytest.raises(AmpscopeError, match="cannot write"):
        replaced(path, b"old", b"new")
    assert held(path) == {}


@pytest.mark.parametrize("fails", ["fsync", "copymode"])
def test_what_fails_half_way_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os if fails == "fsync" else shutil, fails, full)
    with pytest.raises(AmpscopeError, match="No space left on device"):
        replaced(path, b"old", b"new")
    assert held(path) == {"a.py": b"old"}


def test_an_interrupt_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replaced(path, b"old", b"new")
    assert held(path) == {"a.py": b"old"}
