"""What is to be changed about a call."""

from __future__ import annotations

from typing import NamedTuple

from ampscope.analysis.cures.rewriting.found_call import Found, found_call, found_calls
from ampscope.analysis.cures.rewriting.statement import Statement


class Asked(NamedTuple):
    """A change of one call."""

    call: str  #: the function, as code spells it
    argument: int | None = None  #: which operand the change is about
    value: float | None = None  #: the number that goes in
    was: float | None = None  #: the number that stands there

    def found(self, statement: Statement) -> Found | None:
        """The call in a statement; None where it is not clear which."""
        return found_call(statement, self.call)

    def all_found(self, statement: Statement) -> list[Found]:
        """Every call of the function in a statement: a replay has changed all of one line."""
        return found_calls(statement, self.call)
