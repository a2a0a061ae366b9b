"""What a diagnosis rests on: the operands of the op at the origin, and the way from there to what mattered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from ampscope.analysis.results import Operand, PathNode
from ampscope.report import numbers
from ampscope.report.safe_text import visible
from ampscope.report.terminal.layout import Fitting

#: Steps of a path shown at its start and at its end; those between are counted.
_HEAD, _TAIL = 5, 3


def _zeros(operand: Operand) -> str:
    if operand.statistics.zeros is None or not operand.numel:
        return ""
    return numbers.share(operand.statistics.zeros / operand.numel, narrow=True)


_OPERAND: dict[str, Callable[[Operand], str]] = {
    "tensor": lambda operand: operand.role,
    "dtype": lambda operand: operand.dtype,
    "shape": lambda operand: operand.shape,
    "range": lambda operand: numbers.span(operand.statistics.min, operand.statistics.max),
    "largest finite": lambda operand: numbers.value(operand.statistics.max_finite),
    "smallest nonzero": lambda operand: numbers.value(operand.statistics.min_positive),
    "zeros": _zeros,
    "not finite": numbers.nonfinite,
}
_EXPENDABLE = ("zeros", "smallest nonzero", "largest finite", "shape")


def operand_table(operands: Sequence[Operand]) -> RenderableType:
    """One row a tensor; a column that no tensor has anything for is left out."""

    def draw(columns: Sequence[str]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for column in columns:
            table.add_column(column, overflow="fold", style="red" if column == "not finite" else "")
        for operand in operands:
            table.add_row(*(Text(visible(_OPERAND[column](operand))) for column in columns))
        return table

    filled = tuple(column for column, cell in _OPERAND.items() if any(map(cell, operands)))
    return Fitting(draw, filled, _EXPENDABLE)


def path_table(path: Sequence[PathNode]) -> RenderableType:
    """The ops from the origin to the value that mattered, one a line, the middle of a long path counted only."""
    left_out = len(path) - _HEAD - _TAIL
    shown, last = (path[:_HEAD], path[-_TAIL:]) if left_out > 1 else (path, path[:0])

    def draw(columns: Sequence[str]) -> Table:
        table = Table(*[Column(overflow="fold") for _ in columns], box=None, pad_edge=False, show_header=False)
        middle = [(Text(f"... {left_out} more"),)] if last else []
        for row in (*_rows(shown, columns), *middle, *_rows(last, columns)):
            table.add_row(*row)
        return table

    return Fitting(draw, tuple(_NODE), ("range", "module"))


def _rows(nodes: Sequence[PathNode], columns: Sequence[str]) -> list[tuple[Text, ...]]:
    return [tuple(Text(visible(_NODE[column](node))) for column in columns) for node in nodes]


def _what(node: PathNode) -> str:
    name = _torch_name(node.op)
    return name if node.name in ("", node.op) else f"{name} {node.name}"


def _torch_name(op: str) -> str:
    """``mul.Tensor`` for ``aten.mul.Tensor``, ``bmm`` for ``aten.bmm.default``: which overload ran is seen."""
    return op.removeprefix("aten.").removesuffix(".default")


def _place(node: PathNode) -> str:
    return f"{node.source.file.rpartition('/')[2]}:{node.source.line}" if node.source else ""


_NODE: dict[str, Callable[[PathNode], str]] = {
    "op": _what,
    "module": lambda node: node.module,
    "place": _place,
    "range": lambda node: numbers.span(node.min, node.max),
}
