"""The ranges of a run's values for the terminal: the places closest to overflow, one a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ampscope.analysis.precision.ranges.ranges import RangeRow, Ranges
from ampscope.report import numbers, precision_words
from ampscope.report.safe_text import visible
from ampscope.report.terminal.text_blocks import Fitting, indented, prose


def as_text(ranges: Ranges) -> RenderableType:
    """The closest places of a rank, and what of its steps that rests on."""
    return Group(*_blocks(ranges, ranges.rows))


def _blocks(ranges: Ranges, rows: Sequence[RangeRow]) -> Iterator[RenderableType]:
    if not rows:
        yield prose(
            "No step of this run was traced op by op, so nothing is known of its ranges. Record some: "
            "ampscope.watch(model, scaler, every=100)."
        )
        return
    share = numbers.share(ranges.sampled_share, narrow=True)
    replayed = f", {ranges.replayed_steps:,} more in a replay" if ranges.replayed_steps else ""
    steps = f"{ranges.sampled_steps:,} of {numbers.count(ranges.steps, 'step')}"
    yield prose(
        f"{steps} ({share}) were recorded op by op as they ran{replayed}; "
        f"these are the {len(rows):,} of {numbers.count(ranges.places, 'place')} closest to overflow."
    )
    yield Text()
    yield indented(_table(rows))
    yield from _notes(rows)
    if lost := precision_words.gradients_sentence(ranges):
        yield Text()
        yield prose(lost)
    if ranges.note:
        yield Text()
        yield prose(ranges.note)


_COLUMNS: dict[str, Callable[[RangeRow], str]] = {
    "headroom, bits": lambda row: precision_words.bits(row.headroom_bits),
    "place": precision_words.place_words,
    "phase": lambda row: row.phase,
    "dtype": lambda row: row.dtype,
    "line": precision_words.line,
    "largest": lambda row: numbers.value(row.largest),
    "bits in 100 steps": precision_words.growth,
    "overflows at": precision_words.forecast,
    "subnormal": lambda row: numbers.share(row.underflow_share, narrow=True, missing="not measured"),
    "zero": lambda row: numbers.share(row.zero_share, narrow=True, missing="not measured"),
    "not in float32": precision_words.flushed,
}
_NUMERIC = ("headroom, bits", "largest", "bits in 100 steps", "subnormal", "zero", "not in float32")
_EXPENDABLE = ("not in float32", "zero", "subnormal", "phase", "largest", "line", "dtype")


def _table(rows: Sequence[RangeRow]) -> RenderableType:
    def draw(columns: Sequence[str]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for column in columns:
            style = "yellow" if column == "overflows at" else ""
            table.add_column(column, justify="right" if column in _NUMERIC else "left", overflow="fold", style=style)
        for row in rows:
            table.add_row(*(Text(visible(_COLUMNS[column](row))) for column in columns))
        return table

    filled = tuple(column for column, cell in _COLUMNS.items() if any(map(cell, rows)))
    return Fitting(draw, filled, _EXPENDABLE)


def _notes(rows: Sequence[RangeRow]) -> Iterator[RenderableType]:
    if any(row.flushed_share for row in rows):
        yield Text()
        yield prose(
            "Not in float32: elements that are zero though the same op in float32, given the same, keeps them. "
            "Not known where it adds up products, and of what comes from outside."
        )
    if any(row.scale is not None for row in rows):
        yield Text()
        yield prose("Gradients carry the loss scale, which makes room for them by itself: they come last.")
    if any(row.fixed for row in rows):
        yield Text()
        yield prose("What is bounded, or the same in every step, cannot grow: it comes after all that can.")
