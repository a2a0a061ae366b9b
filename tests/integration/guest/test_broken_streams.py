"""Where nothing can be printed, or whoever prints raises: training goes on, and no step is lost."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import ampscope
from ampscope.trace.schema import EventKind, Table
from ampscope.trace.write.row_queue import QueuedRows, RowQueue
from tests.support.training.guarded_training import STEPS, training
from tests.support.training.injuries.injected_faults import Fault, functions
from tests.support.training.twin_runs import differences, exact_state, seed_everything


class Raising(io.TextIOBase):
    """A stream that raises at every write."""

    def __init__(self, error: Exception) -> None:
        self.error, self.asked = error, 0

    def write(self, _: str) -> int:
        self.asked += 1
        raise self.error


def closed() -> Any:
    stream = io.StringIO()
    stream.close()
    return stream


def without_reader() -> Any:
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w", buffering=1)


STREAMS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "closed": closed,
    "a pipe without reader": without_reader,
    "disk full": lambda: Raising(OSError(28, "No space left on device")),
    "not in its encoding": lambda: Raising(UnicodeEncodeError("ascii", "\xfc", 0, 1, "ordinal not in range")),
    "another class": object,
    "out of memory": lambda: Raising(MemoryError()),
}


class RaisingHandler(logging.Handler):
    """A handler of the user's."""

    asked = 0

    def emit(self, _: logging.LogRecord) -> None:
        self.asked += 1
        raise ZeroDivisionError


@contextlib.contextmanager
def broken_stderr(name: str) -> Iterator[None]:
    """In the test's own body: pytest gives each of its phases another one."""
    stream = STREAMS[name]()
    with contextlib.redirect_stderr(stream):
        yield
    if isinstance(stream, io.TextIOWrapper):
        with pytest.raises(BrokenPipeError):  # what was written is there still
            stream.close()


@pytest.fixture(params=["", "ampscope", "py.warnings"])
def raising(request: pytest.FixtureRequest) -> Iterator[RaisingHandler]:
    logger, handler = logging.getLogger(request.param), RaisingHandler()
    logger.addHandler(handler)
    logging.captureWarnings(True)
    yield handler
    logging.captureWarnings(False)
    logger.removeHandler(handler)


def _shown(message: Any, *_: Any) -> None:
    """Much as Python itself shows a warning, in whose place pytest has put something."""
    sys.stderr.write(f"{message}\n")


def trained(folder: Path, watching: Callable[[], object] = lambda: None) -> dict[str, bytes]:
    scopes: list[ampscope.Scope] = []

    def watch(model: nn.Module, scaler: Any) -> None:
        scopes.append(ampscope.watch(model, scaler, dir=folder))
        watching()

    seed_everything()
    try:
        return exact_state(training(watch))
    finally:
        for scope in scopes:
            scope.close()


def fault() -> Fault:
    """A fault of a part that is told by a warning."""
    (function,) = (each for each in functions() if str(each) == "tape.call_tape.Tape.module_call")
    return Fault(function, 2, RuntimeError)


@pytest.mark.parametrize("faulty", [False, True])
@pytest.mark.parametrize("stream", STREAMS)
def test_a_broken_stderr(
    stream: str,
    faulty: bool,
    unwatched_state: dict[str, bytes],
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with warnings.catch_warnings(), fault().injected() as injected, broken_stderr(stream):
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", _shown)
        assert differences(trained(run_folder, lambda: setattr(injected, "armed", faulty)), unwatched_state) == []
    _all_is_there(run_folder, faulty=faulty)


@pytest.mark.parametrize("faulty", [False, True])
def test_a_logging_handler_that_raises(
    raising: RaisingHandler, faulty: bool, unwatched_state: dict[str, bytes], run_folder: Path
) -> None:
    with warnings.catch_warnings(), fault().injected() as injected:
        warnings.simplefilter("always")
        logging.captureWarnings(True)  # anew: pytest, too, has put something in the place of what shows warnings
        assert differences(trained(run_folder, lambda: setattr(injected, "armed", faulty)), unwatched_state) == []
    assert raising.asked == (faulty and raising not in logging.getLogger("ampscope").handlers)
    _all_is_there(run_folder, faulty=faulty)


@pytest.mark.parametrize("stream", STREAMS)
def test_what_a_thread_of_the_writer_has_to_say(
    stream: str, unwatched_state: dict[str, bytes], run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That rows were dropped; unheard, it ends nothing."""

    real = RowQueue.take

    def dropping(queue: RowQueue) -> QueuedRows:
        queue.dropped = 1
        return real(queue)

    monkeypatch.setattr(RowQueue, "take", dropping)
    with broken_stderr(stream):
        assert differences(trained(run_folder), unwatched_state) == []
    _all_is_there(run_folder, faulty=False)


def _all_is_there(folder: Path, *, faulty: bool) -> None:
    with ampscope.open_run(folder) as run:
        assert run.status == "closed"
        assert [row.step for row in run.rows(Table.STEPS)] == list(range(STEPS))
        assert len(run.rows(Table.EVENTS, kind=EventKind.WARNING)) == faulty
