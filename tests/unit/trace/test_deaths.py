"""A compaction that dies at any of its steps: nothing is lost or doubled, and the next one finishes it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ampscope.trace.compaction import compact
from tests.unit.trace.many_parts import age, files_of, many_parts, what_is_read

#: What changes a file, or makes a change last.
STEPS = [(os, "fsync"), (os, "utime"), (Path, "replace"), (Path, "unlink"), (pq.ParquetWriter, "write_table")]


class Death(BaseException):
    """The process is gone: nothing that follows happens any more."""


@contextmanager
def dying_at(number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Every change from the ``number``-th on fails, those by which a live process would tidy up among them."""
    made = [0]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **named: Any) -> Any:
            made[0] += 1
            if made[0] > number:
                raise Death
            return real(*arguments, **named)

        return step

    with monkeypatch.context() as patch:
        for owner, name in STEPS:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        yield made


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = many_parts(tmp_path_factory.mktemp("runs") / "run", ranks=1, segments=2)
    keep = {"ops", "events"}
    for table in (folder / "rank=0").iterdir():
        if table.is_dir() and table.name not in keep:
            shutil.rmtree(table)
    age(folder)
    return folder


@pytest.fixture(scope="module")
def expected(template: Path) -> dict[str, Any]:
    return what_is_read(template)


def test_at_every_step(
    template: Path, expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = shutil.copytree(template, tmp_path / "whole")
    with dying_at(10_000, monkeypatch) as made:
        compact([finished], age=0.0)
    whole = files_of(finished)
    assert made[0] > 15
    for number in range(made[0]):
        folder = shutil.copytree(template, tmp_path / str(number))
        with pytest.raises(Death), dying_at(number, monkeypatch):
            compact([folder], age=0.0)
        assert what_is_read(folder) == expected, f"after {number} steps"
        (done,) = compact([folder], age=0.0).runs
        assert done.left_alone == ()
        assert files_of(folder) == whole, f"after {number} steps"
        assert what_is_read(folder) == expected, f"after {number} steps"


PROGRAM = """
import os, signal, sys
from pathlib import Path
import pyarrow.parquet as pq
from ampscope.trace.compaction import compact

left = int(sys.argv[2])

def counted(real):
    def step(*arguments, **named):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)
    return step

steps = [(os, "fsync"), (os, "utime"), (Path, "replace"), (Path, "unlink"), (pq.ParquetWriter, "write_table")]
for owner, name in steps:
    setattr(owner, name, counted(getattr(owner, name)))
compact([Path(sys.argv[1])], age=0.0)
"""


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
@pytest.mark.parametrize("number", [1, 4, 12])
def test_a_kill(number: int, template: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    folder = shutil.copytree(template, tmp_path / "run")
    killed = subprocess.run([sys.executable, "-c", PROGRAM, str(folder), str(number)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert what_is_read(folder) == expected
    assert compact([folder], age=0.0).runs[0].left_alone == ()
    assert what_is_read(folder) == expected
    assert len(files_of(folder)) == 2
