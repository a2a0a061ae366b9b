"""Calls to what belongs to others, on a thread of their own."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import pytest

from ampscope.capture.record import outbox as outboxes
from ampscope.capture.record.outbox import Outbox
from ampscope.capture.torch_support.guard import Guard

SOON = 30.0


def in_time() -> float:
    return time.monotonic() + SOON


class Made:
    """An outbox, and what was said of it."""

    def __init__(self, patience: float = 60.0) -> None:
        self.said: list[str] = []
        self.outbox = Outbox(Guard("the tracker", self.said.append), patience=patience)
        self.go = threading.Event()
        self.blocked = threading.Event()

    def block(self) -> None:
        self.blocked.set()
        assert self.go.wait(SOON)


@pytest.fixture
def made() -> Iterator[Made]:
    made = Made(patience=0.0)
    yield made
    made.go.set()
    made.outbox.end()
    assert made.outbox.ended(in_time())


def test_calls_are_made_in_order_and_on_one_other_thread(made: Made) -> None:
    seen: list[tuple[int, int]] = []
    for number in range(5):
        made.outbox.put(lambda number=number: seen.append((number, threading.get_ident())))  # type: ignore[misc]
    made.outbox.end(lambda: seen.append((5, threading.get_ident())))
    assert made.outbox.ended(in_time())
    assert [number for number, _ in seen] == [0, 1, 2, 3, 4, 5]
    assert len({thread for _, thread in seen} - {threading.get_ident()}) == 1


def test_nothing_is_called_after_a_fault_which_is_told_once(made: Made, recwarn: pytest.WarningsRecorder) -> None:
    called: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        made.outbox.put(_fails("first"))
        made.outbox.put(_fails("second"))
        made.outbox.end(lambda: called.append("last"))
        assert made.outbox.ended(in_time())
    assert called == []
    (said,) = made.said
    assert said.startswith("the tracker switched itself off after ValueError: first")
    assert len(recwarn) == 1


def test_a_call_that_does_not_return_keeps_nobody(made: Made) -> None:
    made.outbox.put(made.block)
    assert made.blocked.wait(SOON)
    made.outbox.put(lambda: None)
    made.outbox.end()
    assert not made.outbox.ended(time.monotonic())


def test_what_is_too_much_is_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outboxes, "MOST_WAITING", 3)
    made, seen = Made(), list[int]()
    made.outbox.put(made.block)
    assert made.blocked.wait(SOON)
    for number in range(10):
        made.outbox.put(lambda number=number: seen.append(number))  # type: ignore[misc]
    made.go.set()
    made.outbox.end()
    assert made.outbox.ended(in_time())
    assert (seen, made.outbox.left_out, made.said) == ([0, 1, 2], 7, [])


def test_what_hangs_while_more_waits_is_switched_off(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outboxes, "MOST_WAITING", 1)
    made.outbox.put(made.block)
    assert made.blocked.wait(SOON)
    made.outbox.put(lambda: None)
    with pytest.warns(RuntimeWarning, match="the tracker switched itself off after TimeoutError: a call that has not"):
        made.outbox.put(lambda: None)
    made.outbox.put(lambda: None)
    assert (len(made.said), made.outbox.left_out) == (1, 1)


def test_a_forked_child_has_no_such_thread(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    made.outbox.put(lambda: called.append(1))
    assert made.outbox.ended(time.monotonic())
    monkeypatch.undo()
    made.outbox.end()
    assert made.outbox.ended(in_time())
    assert called == []


def _fails(text: str) -> Callable[[], None]:
    def call() -> None:
        raise ValueError(text)

    return call
