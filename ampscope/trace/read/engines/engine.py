"""Defines queries over one frame, in the words that every engine understands, DuckDB's SQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt
import pyarrow as pa


class Query(NamedTuple):
    """A query over a frame."""

    select: str = "*"
    where: str = ""  #: which rows; all by default
    by: str = ""  #: what they are grouped by; not at all by default
    having: str = ""  #: which groups, by the names of what is selected
    order: str = ""  #: what it is sorted by; of groups the names of what is selected
    limit: int | None = None  #: how many rows at most


class Pieces(NamedTuple):
    """The pieces that make up a table, or a part of it, at one moment."""

    sealed: dict[tuple[str, ...], list[Path]]  #: parts, by their columns: those of today's schema or some of them
    loaded: pa.Table  #: all other rows, of journals and of older versions, with the columns that the frame shall have

    @property
    def parts(self) -> list[Path]:
        """All sealed parts."""
        return [part for parts in self.sealed.values() for part in parts]


class Engine(Protocol):
    """Answers queries over its own kind of frame; every answer is the same whichever engine gives it."""

    def rows(self, frame: Any, query: Query) -> list[tuple[Any, ...]]:
        """The answer as rows of Python values."""

    def arrays(self, frame: Any, query: Query) -> dict[str, npt.NDArray[Any]]:
        """The answer as arrays by name, masked where null; a list's column holds arrays."""

    def batches(self, frame: Any) -> Iterator[pa.RecordBatch]:
        """The rows of a frame, some at a time."""

    def names(self, frame: Any) -> list[str]:
        """The columns of a frame, in order."""

    def reading(self) -> AbstractContextManager[None]:
        """Around a query.

        Raises:
            RunDamaged: a part cannot be read; mistakes in the query raise as they are.
        """
