"""Scopes that a collection finds: in whatever thread it comes, inside whatever, nobody waits for anybody."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import ampscope
from ampscope.capture.scope import open_scopes
from ampscope.capture.torch_support.calls.threads import changing


@pytest.fixture
def held_elsewhere() -> Iterator[None]:
    """Another thread is putting something in place, and comes to no end."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with changing:
            held.set()
            assert over.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(30)
    yield
    over.set()
    thread.join(30)


def watched(folder: Path) -> ampscope.Scope:
    return ampscope.watch(nn.Linear(2, 2), dir=folder, quiet=True)


def test_a_closed_scope_goes_without_waiting(run_folder: Path, request: pytest.FixtureRequest) -> None:
    scope = watched(run_folder)
    scope.close()
    request.getfixturevalue("held_elsewhere")
    del scope
    gc.collect()  # would never return


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.usefixtures("held_elsewhere")
def test_a_forked_child_may_watch() -> None:
    child = os.fork()
    if not child:
        with changing:  # would never be given: its holder was not forked
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_what_could_not_be_closed_is_closed_by_the_next_watch(tmp_path: Path) -> None:
    scope = watched(tmp_path / "first")
    other = threading.Thread(target=scope.__del__)
    with changing:
        other.start()
        other.join(30)
    with ampscope.open_run(tmp_path / "first") as run:
        assert run.status == "open"
    with watched(tmp_path / "second"):
        assert scope not in open_scopes()
        with ampscope.open_run(tmp_path / "first") as run:
            assert run.status == "closed"
