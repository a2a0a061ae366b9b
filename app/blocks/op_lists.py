"""Ops of a traced step as lines to be picked: a list around the cursor, and neighbours in the dataflow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ampscope.analysis.arrays import IntArray
from ampscope.analysis.replay.op_detail import OperandMagnitudes, OpLine, neighbourhood, op_lines
from ampscope.analysis.replay.recording import Recording
from ampscope.report.numbers import count, value
from ampscope.report.palette import ALARM, dtype_color
from ampscope.trace.schema import Node
from blocks.components.picker import BarPiece, Line, picker

Go = Callable[[int], None]

#: Ops on either side of the cursor.
AROUND = 15
#: The powers of two that a line's bar spans.
_LOW, _HIGH = -32.0, 24.0


def op_title(line: OpLine) -> str:
    """``bmm``, ``blocks.0.weight``: an op without its family, an input by its name."""
    if line.op in list(Node):
        return line.name or line.op
    return line.op.removeprefix("aten.").removesuffix(".default")


def largest_words(line: OpLine) -> str:
    """The largest magnitude of an op's result."""
    if not line.is_finite:
        return "intended" if line.is_intended else "NaN or inf"
    return "" if line.magnitudes.largest is None else value(line.magnitudes.peak)


def ops_around(recording: Recording, places: IntArray, position: int, go: Go) -> None:
    """The list of the ops at ``places`` (ascending) with the cursor in the middle."""
    shown = op_lines(recording, neighbourhood(places, position, AROUND).tolist())
    lines = [_short(op_row(line, note=_place(line), current=line.position == position), line.module) for line in shown]
    picker("replay-ops", "Ops in the order in which they ran", lines, go, height=440)


def neighbour_list(key: str, label: str, shown: Sequence[OpLine], go: Go, address: Callable[[int], str]) -> None:
    """Ops that this one reads from, or is read by: links, by the ``address`` of a sequence number."""
    lines = [replace(op_row(line, note=line.role or _place(line)), href=address(line.seq)) for line in _once(shown)]
    picker(key, label, lines, go, height=150)


def op_row(line: OpLine, *, note: str = "", current: bool = False) -> Line:
    """An op as a line with its magnitudes as a bar."""
    words = f"{line.op} {line.name}".strip()
    return Line(
        id=line.position,
        lead=count(line.seq),
        text=op_title(line),
        note=note,
        tail=largest_words(line),
        hint=f"{words} in {line.module}" if line.module else words,
        kind=_kinds(
            current=current, bad=line.is_alarming, near=line.is_near, faint=line.op in list(Node) and not current
        ),
        bar=magnitude_bar(line.magnitudes, line.dtype, is_finite=not line.is_alarming),
    )


def magnitude_bar(values: OperandMagnitudes, dtype: str, *, is_finite: bool = True) -> tuple[BarPiece, ...]:
    """Draws the dtype's range, and in it the range of the values."""
    marks: list[BarPiece] = []
    if values.limit is not None and values.floor is not None:
        marks.append(_mark(values.floor, values.limit, "range", dtype_color(dtype)))
    if values.largest is not None:
        low = values.largest if values.smallest is None else values.smallest
        marks.append(_mark(low, values.largest, "values", dtype_color(dtype)))
    if not is_finite:
        marks.append(BarPiece(left=96.0, width=4.0, kind="alarm", color=ALARM))
    return tuple(marks)


def _mark(low: float, high: float, kind: str, color: str) -> BarPiece:
    left, right = _percent(low), _percent(high)
    return BarPiece(left=min(left, 98.0), width=right - left, kind=kind, color=color)


def _percent(power: float) -> float:
    return 100 * (min(max(power, _LOW), _HIGH) - _LOW) / (_HIGH - _LOW)


def _kinds(**holds: bool) -> str:
    """The names of what holds."""
    return " ".join(name for name, held in holds.items() if held)


def _place(line: OpLine) -> str:
    """The last name of the module, with the one before it where that is a number: the list is narrow."""
    *rest, last = line.module.split(".")
    return f"{rest[-1]}.{last}" if rest and last.isdigit() else last


def _short(row: Line, module: str) -> Line:
    """Without the module before a parameter's name: the note has its end, and the list is narrow."""
    return replace(row, text=row.text.removeprefix(f"{module}."))


def _once(shown: Sequence[OpLine]) -> list[OpLine]:
    """Each op once: one that reads the same tensor twice is one neighbour."""
    return list({line.position: line for line in reversed(shown)}.values())[::-1]
