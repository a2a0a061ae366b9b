"""Meanings are read from the comments behind fields."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from ampscope.trace.schema.tables import field_comments


class Row(NamedTuple):
    """A row."""

    step: int  #: counts
    #: on
    bare: str
    wide: tuple[str, ...] = ()  #: behind the last line

    @property
    def twice(self) -> int:
        """No field."""
        return 2 * self.step


class Kind(StrEnum):
    """A kind."""

    ONE = "one"  #: the first
    TWO = "two"


def test_a_comment_goes_on_below_and_a_field_without_one_has_no_meaning() -> None:
    assert field_comments(Row) == {"step": "counts on", "bare": "", "wide": "behind the last line"}


def test_members_of_an_enumeration_have_theirs() -> None:
    assert field_comments(Kind) == {"ONE": "the first", "TWO": ""}
