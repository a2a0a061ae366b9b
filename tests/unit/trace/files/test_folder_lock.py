"""The lock on a rank's folder, by the system's own and where there is none, as on Windows."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampscope.trace.files import folder_lock
from ampscope.trace.files.folder_lock import FolderLock, is_locked
from ampscope.trace.read.run import open_run
from tests.support.paths import ROOT
from tests.support.trace_builder import TraceBuilder

HOLD = """
import sys
from pathlib import Path
from ampscope.trace.files import folder_lock
folder_lock._HAS_FLOCK = sys.argv[2] == "flock"
lock = folder_lock.FolderLock(Path(sys.argv[1]), tidying=sys.argv[3] == "tidying")
print(lock.held, flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["flock", "portable"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(folder_lock, "_HAS_FLOCK", request.param == "flock")
    return str(request.param)


@pytest.fixture
def holding(kind: str, tmp_path: Path) -> Any:
    """Another process that holds the lock."""
    begun: list[subprocess.Popen[str]] = []

    def hold(tidying: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD, str(tmp_path), kind, tidying]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        begun.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        return process

    yield hold
    for process in begun:
        process.kill()
        process.communicate()


def test_one_at_a_time(kind: str, tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    lock = FolderLock(tmp_path)
    assert lock.held
    assert is_locked(tmp_path)
    with pytest.raises(BlockingIOError, match="another process is writing this run"):
        FolderLock(tmp_path)
    lock.release()
    lock.release()
    assert not is_locked(tmp_path)
    FolderLock(tmp_path).release()


def test_of_another_process_until_it_dies(holding: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = holding()
    assert is_locked(tmp_path)
    with pytest.raises(BlockingIOError):
        FolderLock(tmp_path)
    process.kill()
    process.wait()
    assert not is_locked(tmp_path)
    FolderLock(tmp_path).release()


def test_of_one_that_tidies_up_is_waited_for(holding: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = holding("tidying")
    assert not is_locked(tmp_path), "nobody writes"
    taken: list[FolderLock] = []
    thread = threading.Thread(target=lambda: taken.append(FolderLock(tmp_path)))
    thread.start()
    thread.join(2 * folder_lock._ATTEMPTS * folder_lock._PAUSE_S)
    assert not taken
    process.kill()
    thread.join(60)
    assert is_locked(tmp_path)
    taken[0].release()


def test_a_run_is_open_while_it_is_written(kind: str, run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.step()
    trace.leave_open()
    with open_run(run_folder) as run:
        assert run.status == "open"
        with pytest.raises(BlockingIOError):
            TraceBuilder(run_folder)
        trace.close()
    with open_run(run_folder) as run:
        assert run.status == "closed"
    TraceBuilder(run_folder).close()


def test_where_neither_is_there_a_run_is_written_unlocked(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "_HAS_FLOCK", False)
    monkeypatch.setitem(sys.modules, "filelock", None)
    trace = TraceBuilder(run_folder)
    assert not trace.writer.manifest.segments[0].locked
    trace.step()
    trace.close()
    with open_run(run_folder) as run:
        assert run.status == "closed"


def test_a_system_without_fcntl_is_known(tmp_path: Path) -> None:
    ask = (
        "import sys; sys.modules['fcntl'] = None\n"
        "from ampscope.trace.files import folder_lock\n"
        "from pathlib import Path\n"
        "assert not folder_lock._HAS_FLOCK\n"
        "lock = folder_lock.FolderLock(Path(sys.argv[1]))\n"
        "print(lock.held, folder_lock.is_locked(Path(sys.argv[1])))\n"
        "lock.release()\n"
        "print(folder_lock.is_locked(Path(sys.argv[1])))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ask, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout == "True True\nFalse\n"
