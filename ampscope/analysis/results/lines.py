"""The lines, operands and ops that results speak of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ampscope.trace.schema import UNMEASURED, Statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """A line of someone's program."""

    file: str
    line: int
    function: str
    code: str


class CodeLine(NamedTuple):
    """A line of someone's program where the function does not matter; JSON shows it as its text."""

    file: str
    line: int
    code: str

    @property
    def place(self) -> str:
        """``train.py:8``."""
        return f"{self.file}:{self.line}"

    def __str__(self) -> str:
        return f"{self.place} {self.code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A tensor an op read or wrote, with the statistics taken when it ran (null: not measured)."""

    role: str  #: ``input 0``, ``output 0``, or the name of an input, parameter or buffer
    dtype: str
    shape: str
    numel: int | None = None
    statistics: Statistics = UNMEASURED

    @property
    def exp_counts(self) -> tuple[int, ...]:
        """The bins of its exponent histogram; empty where there is none."""
        return self.statistics.exp_counts or ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PathNode:
    """One op on the way from the origin to the value that mattered, origin first."""

    seq: int
    op: str
    name: str  #: for inputs, parameters, losses and gradients
    module: str
    phase: str
    dtype: str
    shape: str
    min: float | None
    max: float | None
    source: SourceLine | None
    module_type: str = ""  #: empty outside every watched module; the model itself has a type, but no name
