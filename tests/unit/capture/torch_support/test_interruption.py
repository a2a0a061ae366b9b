"""What comes from outside into AMPscope's code, by a signal or another thread, is known from what that code raises."""

from __future__ import annotations

import ctypes
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ampscope.capture.torch_support.guard import Guard, Suppressed, is_interruption


class Preempted(Exception):
    """What a program tells itself by a signal."""


def plain(number: int, frame: Any) -> None:
    raise Preempted


def forgetful(number: int, frame: Any) -> None:
    del frame
    raise Preempted


def once(*given: Any) -> None:
    """Resets itself, as handlers of preemptions do."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    deeper()


def deeper() -> None:
    raise Preempted


class Handler:
    def __call__(self, number: int, frame: Any) -> None:
        del frame
        raise Preempted

    def method(self, number: int, frame: Any) -> None:
        raise Preempted


@functools.wraps(plain)
def wrapped(*given: Any) -> None:
    plain(*given)


HANDLERS: dict[str, Callable[..., Any]] = {
    "function": plain,
    "one that forgets its frame": forgetful,
    "one that resets itself": once,
    "object": Handler(),
    "method": Handler().method,
    "partial": functools.partial(plain),
    "decorated": wrapped,
    "closure": lambda *_: deeper(),
}


@pytest.fixture(params=list(HANDLERS))
def handler(request: pytest.FixtureRequest) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, HANDLERS[request.param])
    yield
    signal.signal(signal.SIGUSR1, before)


def never(text: str) -> None:
    raise AssertionError(text)


@pytest.mark.usefixtures("handler")
def test_what_a_handler_raises_goes_through_a_guard() -> None:
    guard = Guard("a part", never)
    with pytest.raises(Preempted), guard:
        signal.raise_signal(signal.SIGUSR1)
    assert not guard.broken


@pytest.mark.usefixtures("handler")
def test_and_out_of_a_replay() -> None:
    with pytest.raises(Preempted), Suppressed():
        signal.raise_signal(signal.SIGUSR1)


def count() -> None:
    for _ in range(10**12):
        pass


def test_what_another_thread_puts_in() -> None:
    """It surfaces in a loop of pure Python, between two of its instructions."""
    told = []

    def work() -> None:
        guard = Guard("a part", never)
        try:
            with guard:
                count()
        except Preempted:
            told.append(guard.broken)

    thread = threading.Thread(target=work)
    thread.start()
    number = thread.ident or 0
    while sys._current_frames()[number].f_code is not count.__code__:
        pass
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(number), ctypes.py_object(Preempted))
    thread.join()
    assert told == [False]


def failing(error: BaseException) -> BaseException:
    """The error as it is after it was raised."""
    try:
        raise error
    except BaseException as raised:  # noqa: BLE001  # of any kind
        return raised


@pytest.mark.parametrize("error", [Preempted(), ValueError("no"), MemoryError()], ids=lambda each: type(each).__name__)
def test_what_code_raises_by_itself_is_none(error: BaseException) -> None:
    assert not is_interruption(failing(error))


def test_nor_is_what_python_raises() -> None:
    for call in (lambda: int("x"), lambda: dict[str, int]()["x"], lambda: next(iter(())), deeper):
        with pytest.raises(Exception) as caught:  # noqa: PT011  # of several classes
            call()
        assert not is_interruption(caught.value)


def test_nor_what_a_handler_raises_when_the_program_calls_it() -> None:
    with pytest.raises(Preempted) as caught:
        plain(1, None)
    assert not is_interruption(caught.value)
