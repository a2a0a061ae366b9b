"""How a watched run ends: with an error, without one, or so that nobody can tell."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from typing import NamedTuple

#: How the names of exceptions end that say something failed; by others (``StopTraining``) a program stops itself.
_FAILURES = ("Error", "Exception", "Warning")


class RunEnd(NamedTuple):
    """The end of a run."""

    error: BaseException | None = None  #: that ended it
    is_known: bool = False  #: whether ``error`` is all there is to know; else an error may have ended it unseen

    @property
    def failure(self) -> BaseException | None:
        """The error, where it is one: neither Ctrl+C, nor what a program stops itself by."""
        return self.error if self.error is not None and _is_failure(self.error) else None

    def reasons(self) -> Iterator[BaseException]:
        """The error, and those that it was raised from or while handling."""
        error, seen = self.error, set[int]()
        while error is not None and id(error) not in seen:
            yield error
            seen.add(id(error))
            error = error.__cause__ or error.__context__


#: Nothing is known of the end, or it has not come.
NOT_KNOWN = RunEnd()


def in_flight(before: int) -> RunEnd:
    """The end of a run that is closed now, by whatever is being handled at the moment.

    Args:
        before: What `handled` was when the run began: a program that tries again is no error of the second run.
    """
    error = sys.exc_info()[1]
    known = error is not None and id(error) != before
    return RunEnd(error, is_known=True) if known else NOT_KNOWN


def of_process(before: int) -> RunEnd:
    """The end of a run that is still open when the process ends; ``before`` as for `in_flight`."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    is_interactive = hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__")  # there, errors end a cell at most
    known = error is not None and id(error) != before and not is_interactive
    return RunEnd(error, is_known=True) if known else NOT_KNOWN


def handled() -> int:
    """``id`` of the exception that is being handled now; 0 without one."""
    error = sys.exc_info()[1]
    return id(error) if error is not None else 0


def _is_failure(error: BaseException) -> bool:
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return isinstance(error, Exception) and type(error).__name__.endswith(_FAILURES)
