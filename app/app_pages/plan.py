"""Plan: would bf16, fp16 or fp8 do, for which modules, and at which loss scales?"""

from __future__ import annotations

from functools import partial

import streamlit as st

from ampscope.analysis.precision.plan import Plan
from ampscope.analysis.precision.plan_modules import NAMES, SCALED
from ampscope.report.figures.plan_figures import plan_matrix, scale_bars
from ampscope.report.html.bars_svg import plan_matrix_html, scale_bars_html
from ampscope.report.html.markup import as_source
from ampscope.report.precision_words import (
    NOTHING_COUNTED,
    SHARES,
    answer,
    basis,
    by_format,
    head,
    module_words,
    notes,
    sentences,
    shares,
    verdict,
    without_code,
)
from blocks.choices import choose, choose_optimizer
from blocks.figure import figure
from blocks.live_part import live_part
from blocks.page_links import link_row, to_precision, to_ranges, to_scale
from blocks.table import table
from blocks.text import heading, paragraph, title, watch_line
from data.run_results import diagnosis_of, overview_of, plan_of, scale_answer_of
from data.run_snapshot import RunSnapshot, current_run

_ALL = "all"
#: Code of more lines is scrolled within so many pixels.
_LINES, _TALL = 24, 480


def plan_page() -> None:
    run = current_run()
    diagnosis = diagnosis_of(run)
    title("Plan")
    if not plan_of(run).modules:
        paragraph(NOTHING_COUNTED)
        watch_line(diagnosis, "every=100")
        live_part(until_counted)
        return
    first = st.container()
    words = {_ALL: "all formats", **{name: head(name) for name in NAMES}}
    chosen = choose("format", "Format", list(words), words.__getitem__)
    name = None if chosen == _ALL else chosen
    with first:
        live_part(partial(would_do, name=name))
    live_part(partial(by_module, name=name))
    live_part(partial(to_paste, name=name))
    heading("At which loss scales the gradients fit float16")
    live_part(partial(scales, optimizer=choose_optimizer(overview_of(run, None).optimizers)))


def until_counted(run: RunSnapshot) -> None:
    """Draw the page anew as soon as there is a plan."""
    if plan_of(run).modules:
        st.rerun()


def would_do(run: RunSnapshot, name: str | None) -> None:
    """The answer, and what it rests on."""
    found = plan_of(run)
    paragraph(f"{answer(found, name)} {basis(found)}")


def by_module(run: RunSnapshot, name: str | None) -> None:
    """The modules in all formats as a picture; in one, every share of them, too."""
    found = plan_of(run)
    heading("What each module would lose")
    matrix = plan_matrix(found, NAMES if name is None else (name,))
    with figure("plan", "What each module would lose", matrix.label):
        st.html(plan_matrix_html(matrix))
    st.caption(" ".join(notes(found, name)))
    if name is not None:
        with st.expander("Every share"):
            columns = ("Module", "", *SHARES.values())
            table(f"Every share in {head(name)}", columns, detail(found, name), numeric=columns[2:])


def detail(found: Plan, name: str) -> list[tuple[str, ...]]:
    """Each module in one format, a row each."""
    losses = [(module.module, module.formats[name]) for module in found.modules]
    return [(module_words(module), verdict(loss), *shares(loss)) for module, loss in losses]


def to_paste(run: RunSnapshot, name: str | None) -> None:
    """Shows which modules may go lower and which should stay up, and the code that makes it so."""
    found = plan_of(run)
    heading("What to do")
    names = NAMES if name is None else (name,)
    table(
        "What to do", ("Format", "May go that low", "Should stay above it"), [by_format(found, each) for each in names]
    )
    for each in names:
        if code := found.code[each]:
            alone = " (torchao converts Linear modules alone)" if each in SCALED else ""
            st.caption(f"For {head(each)}{alone}:")
            st.code(
                as_source(code, len(code)),
                language="python",
                wrap_lines=True,
                height=_TALL if code.count("\n") > _LINES else "content",
            )
        elif name is not None:
            paragraph(without_code(found, each))
    with link_row():
        to_precision(None, label="What each module runs in now")
        to_ranges("How near values come to the ends of their dtypes")


def scales(run: RunSnapshot, optimizer: int | None) -> None:
    """The smallest scale that saves each gradient and the largest at which it does not overflow, against that used."""
    found = scale_answer_of(run, optimizer)
    paragraph(" ".join(sentences(found.window)))
    if bars := scale_bars(found.window, found.current):
        with figure("scales", "Loss scales at which the gradients fit float16", bars.label):
            st.html(scale_bars_html(bars))
    if found.current is not None:
        with link_row():
            to_scale(None, "The loss scale's history")


plan_page()
