"""Whether an error ended a run is known from what is being handled, or from what ended the process."""

from __future__ import annotations

import sys

import pytest

from ampscope.capture.events import END_NOT_KNOWN, RunEnd, end_in_flight, end_of_process, error_handled


def test_what_is_being_handled_when_a_run_is_closed_has_ended_it() -> None:
    assert end_in_flight(error_handled()) == END_NOT_KNOWN
    error, seen, again = ValueError(), END_NOT_KNOWN, END_NOT_KNOWN
    try:
        raise error
    except ValueError:
        seen, again = end_in_flight(0), end_in_flight(error_handled())
    assert seen == RunEnd(error, is_known=True)
    assert again == END_NOT_KNOWN  # it was being handled when the run began


def test_what_ended_the_process_has_ended_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ValueError()
    assert end_of_process(0) == END_NOT_KNOWN
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    assert end_of_process(0) == RunEnd(error, is_known=True)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert end_of_process(0) == END_NOT_KNOWN  # it ended a line that somebody typed


@pytest.mark.parametrize(
    ("error", "is_failure"),
    [
        (RuntimeError(), True),
        (Exception("no gradient"), True),
        (UserWarning(), True),
        (SystemExit(1), True),
        (SystemExit(0), False),
        (SystemExit(), False),
        (KeyboardInterrupt(), False),
        (StopIteration(), False),
        (type("StopTraining", (Exception,), {})(), False),
    ],
)
def test_a_failure_is_what_is_called_one(error: BaseException, is_failure: bool) -> None:
    assert (RunEnd(error, is_known=True).failure is not None) is is_failure


def test_the_reasons_of_an_error_are_those_that_it_was_raised_from() -> None:
    first, second = KeyError(), RuntimeError()
    second.__cause__ = first
    first.__context__ = second  # a circle ends
    assert list(RunEnd(second, is_known=True).reasons()) == [second, first]
