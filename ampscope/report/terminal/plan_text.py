"""A precision plan for the terminal: module by module, what a narrower format would lose, and the plan as code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ampscope.analysis.precision.plan import Plan
from ampscope.analysis.precision.plan_modules import NAMES, ModulePlan
from ampscope.report import numbers
from ampscope.report.precision_words import (
    NOTHING_COUNTED,
    SHARES,
    answer,
    basis,
    head,
    is_overflow_seen,
    notes,
    shares,
    verdict,
    without_code,
)
from ampscope.report.safe_text import visible
from ampscope.report.terminal.text_blocks import Fitting, code, heading, indented, prose

#: The first formats to go where the terminal is narrow.
_EXPENDABLE = ("tf32", "mxfp8_e5m2", "mxfp8_e4m3", "float8_e5m2")


def as_text(plan: Plan, name: str | None = None) -> RenderableType:
    """The plan for all formats, or for one in detail."""
    return Group(*_blocks(plan, name))


def _blocks(plan: Plan, name: str | None) -> Iterator[RenderableType]:
    if not plan.modules:
        yield prose(NOTHING_COUNTED)
        return
    yield prose(f"{answer(plan, name)} {basis(plan)}")
    yield Text()
    yield indented(_all(plan.modules) if name is None else _one(plan.modules, name))
    yield Text()
    yield prose(" ".join(notes(plan, name)))
    for each in NAMES if name is None else (name,):
        yield from _advice(plan, each, asked=name is not None)


def _all(modules: Sequence[ModulePlan]) -> RenderableType:
    def draw(columns: Sequence[str]) -> Table:
        table = _table()
        for column in columns:
            table.add_column(head(column))
        for each in modules:
            table.add_row(_name(each), *(_cell(each, column) for column in columns))
        return table

    return Fitting(draw, NAMES, _EXPENDABLE)


def _one(modules: Sequence[ModulePlan], name: str) -> RenderableType:
    table = _table()
    table.add_column("")
    for words in SHARES.values():
        table.add_column(words, justify="right")
    for each in modules:
        loss = each.formats[name]
        table.add_row(_name(each), verdict(loss), *shares(loss))
    return table


def _table() -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("module", overflow="fold")
    return table


def _name(each: ModulePlan) -> Text:
    return Text(visible(each.module or "(the model itself)"))


def _cell(each: ModulePlan, name: str) -> str:
    loss = each.formats[name]
    if loss.fits is not False:
        return verdict(loss)
    if is_overflow_seen(each, name):
        return "overflowed"
    return f"{SHARES[loss.why]} {numbers.share(getattr(loss, loss.why), narrow=True)}"


def _advice(plan: Plan, name: str, *, asked: bool) -> Iterator[RenderableType]:
    text = plan.code.get(name, "")
    if text:
        yield heading(f"For {name}")
        yield code(text)
    elif asked:
        yield heading(name)
        yield prose(without_code(plan, name))
