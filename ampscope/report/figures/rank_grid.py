"""The figure of ranks by steps: rows of stretches, each with the worst that happened in it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from ampscope.analysis.overview.ranks.step_grid import CellState, StepGrid
from ampscope.report.figures.axis import round_ticks
from ampscope.report.numbers import count

#: Rows that are named; of more, every so many.
_NAMED = 12
#: About as many steps are named below it.
_TICKS = 5

#: What a colour stands for, by the name of its class, in the order of the key.
KEY: dict[CellState, tuple[str, str]] = {
    CellState.STEPPED: ("stepped", "steps"),
    CellState.SKIPPED: ("skipped", "a step skipped"),
    CellState.RECEIVED: ("received", "a bad value came from another rank"),
    CellState.ORIGIN: ("origin", "a bad value was born here"),
    CellState.AFTERMATH: ("aftermath", "weights bad since an earlier step"),
    CellState.APART: ("apart", "differs from its replicas"),
    CellState.NOTHING: ("nothing", "nothing recorded"),
}


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring cells of one row that are alike; places are shares of the width."""

    start: float
    width: float
    kind: str  #: as in `KEY`
    hover: str


@dataclass(frozen=True, slots=True)
class GridRow:
    """One rank, or a few that share a row."""

    name: str  #: empty where it would stand too close to the next
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True)
class RankGrid:
    """The figure."""

    label: str
    rows: tuple[GridRow, ...]
    ticks: tuple[tuple[float, str], ...]  #: steps below it, by their place
    key: tuple[tuple[str, str], ...]  #: class and words of what occurs in it


def rank_grid(grid: StepGrid) -> RankGrid:
    """The picture of ``grid``; one without a step has no rows."""
    rows, columns = grid.cells.shape
    every = max(1, -(-rows // _NAMED))
    drawn = tuple(
        GridRow(_row_name(grid, row) if row % every == 0 else "", _stretches(grid, row, columns)) for row in range(rows)
    )
    occurring = {CellState(int(state)) for state in set(grid.cells.ravel().tolist())}
    return RankGrid(
        label="What happened on each rank, by optimizer step.",
        rows=drawn,
        ticks=_ticks(grid) if columns else (),
        key=tuple(KEY[state] for state in KEY if state in occurring),
    )


def _stretches(grid: StepGrid, row: int, columns: int) -> tuple[Stretch, ...]:
    found = []
    for state, cells in groupby(range(columns), key=lambda column: int(grid.cells[row, column])):
        first, *rest = cells
        last = rest[-1] if rest else first
        steps = _span("step", grid.steps_of(first)[0], grid.steps_of(last)[1])
        kind, words = KEY[CellState(state)]
        hover = f"{_row_name(grid, row)}, {steps}: {words}"
        found.append(Stretch(first / columns, (last + 1 - first) / columns, kind, hover))
    return tuple(found)


def _row_name(grid: StepGrid, row: int) -> str:
    return _span("rank", *grid.ranks_of(row))


def _span(noun: str, first: int, last: int) -> str:
    return f"{noun} {count(first)}" if first == last else f"{noun}s {count(first)} to {count(last)}"


def _ticks(grid: StepGrid) -> tuple[tuple[float, str], ...]:
    total = grid.last_step - grid.first_step
    steps = round_ticks(grid.first_step, grid.last_step, _TICKS, whole=True)
    return tuple(((step - grid.first_step) / max(total, 1), count(int(step))) for step in steps)
