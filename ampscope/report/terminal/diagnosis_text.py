"""A diagnosis on a terminal begins with the verdict; where, why, on what evidence and what to change follow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from ampscope.analysis.causes.catalogue import item_in_words
from ampscope.analysis.cures import trials
from ampscope.analysis.diagnosis.run_summary import what_happened
from ampscope.analysis.results import (
    Diagnosis,
    Finding,
    Incident,
    Operand,
    PathNode,
    Remedy,
    RunInfo,
    ScaleHealth,
    SourceLine,
)
from ampscope.analysis.words import ranks_in_words, received_in_words, replay_in_words, when_in_words
from ampscope.report import numbers
from ampscope.report.diagnosis_words import TITLE, cure_in_words, number_line, remedy_in_words
from ampscope.report.safe_text import visible
from ampscope.report.terminal.runs_text import verdict_in_words
from ampscope.report.terminal.text_blocks import Fitting, changed_lines, code, heading, indented, line, prose
from ampscope.trace.vocabulary import Severity, Verdict

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


def _line_of(node: PathNode) -> str:
    return f"{node.source.file.rpartition('/')[2]}:{node.source.line}" if node.source else ""


_NODE: dict[str, Callable[[PathNode], str]] = {
    "op": _what,
    "module": lambda node: node.module,
    "place": _line_of,
    "range": lambda node: numbers.span(node.min, node.max),
}


_VERDICT_STYLES = {
    Verdict.HEALTHY: "bold green",
    Verdict.AT_RISK: "bold yellow",
    Verdict.PROBLEM: "bold red",
    Verdict.PARTLY_OBSERVED: "bold yellow",
    Verdict.NOT_OBSERVED: "bold yellow",
}
_REPLAYED_STYLES = {True: "green", False: "yellow"}


def as_text(diagnosis: Diagnosis) -> RenderableType:
    """The diagnosis, to be printed by a `rich.console.Console` of any width, with ``crop=False``."""
    return Group(*_blocks(diagnosis))


def run_facts(run: RunInfo) -> str:
    """A run in one line: model, device, extent, and how it ended."""
    model = f"{run.model} with {numbers.count(run.parameters, 'parameter')}" if run.model else "no model"
    extent = f"{numbers.count(run.steps, 'step')}, {run.skipped:,} skipped"
    resumed = f", resumed {numbers.count(run.segments - 1, 'time')}" if run.segments > 1 else ""
    resumed += f", its newest step is the loop's {run.loop_step:,}" if run.loop_step is not None else ""
    ranks = f", {run.world:,} ranks" if run.world > 1 else ""
    missing = f" (nothing of {ranks_in_words(run.missing)})" if run.missing else ""
    device = run.device or "an unknown device"
    return f"{model} on {device}{ranks}{missing}; {extent}{resumed}; {run.status}"


def _blocks(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    yield from _headline(diagnosis)
    primary = diagnosis.primary
    if primary is not None:
        yield from _details(primary)
    if diagnosis.cures:
        yield heading(TITLE)
    for cure in diagnosis.cures:
        yield line(f"- {cure_in_words(cure)}")
        if cure.code:
            yield code(cure.code)
    told = primary.explanation if primary is not None else diagnosis.summary
    yield from _scale([health for health in diagnosis.scale if not health.verdict.is_calm], told=told)
    if diagnosis.ranks:
        yield heading("Ranks")
        yield prose(" ".join(diagnosis.ranks))
    items: list[Incident | Finding] = [*diagnosis.incidents, *diagnosis.findings]
    others = [item for item in items if item != diagnosis.primary]
    yield from _listing("Also", [item for item in others if item.severity is not Severity.INFO])
    yield from _listing("Harmless, nothing to change", [item for item in others if item.severity is Severity.INFO])


def _headline(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    verdict = Text(verdict_in_words(diagnosis.verdict).upper(), style=_VERDICT_STYLES[diagnosis.verdict])
    yield Text.assemble(verdict, "  ", (visible(diagnosis.run.name), "bold"), overflow="fold")
    yield line(run_facts(diagnosis.run), style="dim")
    yield Text()
    primary = diagnosis.primary
    yield prose(diagnosis.summary if primary is None else what_happened(primary))
    if primary is not None and (numbers_of := number_line(primary)):
        yield line(numbers_of, style="bold")
    if diagnosis.note:
        yield prose(diagnosis.note)
    if diagnosis.since:
        yield prose(diagnosis.since)


def _details(item: Incident | Finding) -> Iterator[RenderableType]:
    yield heading("Where")
    yield line(f"{_place(item)}, {when_in_words(item)}")
    yield from _source(item.source)
    if isinstance(item, Incident) and item.received_by:
        yield line(received_in_words(item))
    yield heading("Why")
    yield prose(item.explanation or f"{item_in_words(item).capitalize()}.")
    if isinstance(item, Incident):
        if item.last_good is not None:
            yield heading("What changed")
            yield prose(item.last_good.summary)
        yield from _evidence(item)
    if item.remedies:
        yield heading("Change")
    for number, remedy in enumerate(item.remedies, 1):
        yield from _remedy(number, remedy)


def _place(item: Incident | Finding) -> str:
    if isinstance(item, Finding):
        return "Your training loop"
    module = f" in {item.module}" if item.module else ""
    kind = f" ({item.module_type})" if item.module_type else ""
    return f"{item.op or 'No single op'}{module}{kind}, {item.phase}"


def _source(source: SourceLine | None) -> Iterator[RenderableType]:
    if source is None:
        return
    function = f" in {source.function}" if source.function else ""
    yield line(f"{_nearest(source.file)}:{source.line}{function}", style="cyan")
    if source.code:
        yield code(source.code)


def _evidence(incident: Incident) -> Iterator[RenderableType]:
    operands = (*incident.inputs, *incident.outputs)
    if operands:
        yield heading("Evidence")
        yield indented(operand_table(operands))
    if len(incident.path) > 1:
        yield heading("Path, from the origin to what it spoilt")
        yield indented(path_table(incident.path))
    trust = [replay_in_words(incident), trials.in_words(incident) or _in_fp32(incident)]
    if any(trust):
        yield heading("Checked")
        yield prose(" ".join(filter(None, trust)))


def _in_fp32(incident: Incident) -> str:
    if incident.fp32_ok is None:
        return ""
    return "In float32 the same step is finite." if incident.fp32_ok else "In float32 the same step fails, too."


def _remedy(number: int, remedy: Remedy) -> Iterator[RenderableType]:
    text = Text(f"{number}. {visible(remedy.text)}", overflow="fold")
    style = "" if remedy.verified is None else _REPLAYED_STYLES[remedy.verified]
    text.append(" ").append(f"[{visible(remedy_in_words(remedy))}]", style=style)
    yield indented(text)
    if remedy.diff or remedy.code:
        yield code(changed_lines(remedy.diff) if remedy.diff else remedy.code)


def _scale(healths: list[ScaleHealth], *, told: str) -> Iterator[RenderableType]:
    if healths:
        yield heading("Loss scale")
    for health in healths:
        of = f"optimizer {health.optimizer}: " if len(healths) > 1 else ""
        share = numbers.share(health.lost_share, narrow=True)
        lost = f"{health.skipped:,} of {health.steps:,} steps ({share}) were skipped."
        why = "" if health.explanation in told else f" {health.explanation}"
        yield prose(f"{of}{health.verdict.value}.{why} In all, {lost}")
        for number, remedy in enumerate(health.remedies, 1):
            yield from _remedy(number, remedy)


def _listing(title: str, items: list[Incident | Finding]) -> Iterator[RenderableType]:
    if items:
        yield heading(title)
    for item in items:
        where = f" at {_nearest(item.source.file)}:{item.source.line}" if item.source else ""
        why = f" {item.explanation}" if item.explanation else ""
        yield line(f"- {when_in_words(item)}: {item_in_words(item)}{where}.{why}")


def _nearest(file: str) -> str:
    """The path as one would type it here: relative where the file lies below the working directory."""
    path = Path(file)
    return os.fspath(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
