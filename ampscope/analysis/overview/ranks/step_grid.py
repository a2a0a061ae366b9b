"""Rank by step, thinned to what a screen can show: what was the worst that happened in each cell."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from ampscope.analysis.numerics.arrays import IntArray
from ampscope.analysis.overview.ranks.bad_steps import BadStep
from ampscope.analysis.overview.ranks.replicas import Apart
from ampscope.analysis.overview.ranks.world import World, steps_by_rank
from ampscope.analysis.tables.lazy_tables import collect_groups
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Table

#: Rows and columns that a picture of the whole has at most.
ROWS, COLUMNS = 64, 160


class CellState(IntEnum):
    """The worst that happened in a cell, the least first."""

    NOTHING = 0  #: no step was recorded
    STEPPED = 1
    SKIPPED = 2
    AFTERMATH = 3  #: the weights were not finite before the step
    RECEIVED = 4  #: a value that is not finite came from another rank
    APART = 5  #: the rank differed from its replicas
    ORIGIN = 6  #: a value that is not finite was born here


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepGrid:
    """Cells of ranks by steps. Row r holds ranks ``r * ranks_each`` and on, column c the steps from `first_step` on."""

    ranks: int = 0
    ranks_each: int = 1
    first_step: int = 0
    last_step: int = 0
    steps_each: int = 1
    cells: IntArray = field(default_factory=lambda: np.zeros((0, 0), np.int64))  #: `CellState`

    @property
    def is_empty(self) -> bool:
        """Whether no step was recorded."""
        return self.cells.size == 0

    def ranks_of(self, row: int) -> tuple[int, int]:
        """The first and the last rank of a row."""
        first = row * self.ranks_each
        return first, min(first + self.ranks_each, self.ranks) - 1

    def steps_of(self, column: int) -> tuple[int, int]:
        """The first and the last step of a column."""
        first = self.first_step + column * self.steps_each
        return first, min(first + self.steps_each - 1, self.last_step)


def step_grid(run: Run, world: World, bad: Iterable[BadStep], apart: Iterable[Apart]) -> StepGrid:
    """The picture of all ranks over all steps.

    Args:
        run: The run.
        world: Its ranks.
        bad: Its bad steps.
        apart: Ranks that differ from their replicas.
    """
    steps = steps_by_rank(run)
    if not steps:
        return StepGrid()
    low, high = min(each.first for each in steps.values()), max(each.last for each in steps.values())
    by_rank, by_step = math.ceil(world.size / ROWS), math.ceil((high - low + 1) / COLUMNS)
    cells = np.zeros((math.ceil(world.size / by_rank), (high - low) // by_step + 1), np.int64)
    for each in steps.values():
        first, last = (each.first - low) // by_step, (each.last - low) // by_step
        cells[each.rank // by_rank, first : last + 1] = CellState.STEPPED
    where = f"rank // {by_rank}, (step - {low}) // {by_step}"
    for row, column in collect_groups(run.table(Table.STEPS), where, where, where="skipped"):
        cells[row, column] = CellState.SKIPPED
    grid = StepGrid(
        ranks=world.size, ranks_each=by_rank, first_step=low, last_step=high, steps_each=by_step, cells=cells
    )
    _mark_apart(grid, apart)
    _mark_bad(grid, bad)
    return grid


def _mark_bad(grid: StepGrid, bad: Iterable[BadStep]) -> None:
    for each in bad:
        own = CellState.ORIGIN if each.since is None else CellState.AFTERMATH
        for seen, state in ((each.received, CellState.RECEIVED), (each.origins, own)):
            for one in seen:
                _mark(grid, one.rank, one.step, state)


def _mark_apart(grid: StepGrid, apart: Iterable[Apart]) -> None:
    for each in apart:
        for rank in each.ranks:
            for step in range(each.step, each.last_step + 1, grid.steps_each):
                _mark(grid, rank, step, CellState.APART)


def _mark(grid: StepGrid, rank: int, step: int, state: CellState) -> None:
    row, column = rank // grid.ranks_each, (step - grid.first_step) // grid.steps_each
    if row < grid.cells.shape[0] and 0 <= column < grid.cells.shape[1]:
        grid.cells[row, column] = max(grid.cells[row, column], state)
