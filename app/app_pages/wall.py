"""Wall: one run for a screen across the room. Is it well, how far is it, and has it been heard of lately?"""

from __future__ import annotations

import time

import streamlit as st

from ampscope.analysis.overview.overview import Overview
from ampscope.analysis.results import Diagnosis
from ampscope.report.figures.step_figures import timeline_stack
from ampscope.report.html.cards import Fact, scale_tile, what
from ampscope.report.html.markup import as_html
from ampscope.report.numbers import count, share, value
from ampscope.report.terminal.runs_text import verdict_in_words
from ampscope.trace.vocabulary import Verdict
from blocks.figure import show_figure
from blocks.live_part import live_part, pulse_html
from blocks.page_links import to_overview
from blocks.text import paragraph, tiles, title
from charts import stack_figure
from data.run_results import diagnosis_of, named_items, overview_of, pulse_of
from data.run_snapshot import RunSnapshot


def wall_page() -> None:
    with st.container(key="amp-wall"):
        title("Wall")
    live_part(wall)
    to_overview()


def wall(run: RunSnapshot) -> None:
    """The verdict, a few numbers and the time line, drawn again while the run is being written."""
    diagnosis, overview = diagnosis_of(run), overview_of(run, None)
    st.html(banner(diagnosis))
    if diagnosis.since:
        paragraph(diagnosis.since)
    tiles(facts(overview, diagnosis))
    if run.is_open:
        st.html(pulse_html(pulse_of(run), time.time()))
    if overview.steps:
        stack = timeline_stack(overview, list(named_items(diagnosis).values()))
        show_figure(stack_figure(stack), "wall", "Time line", stack.label)
    else:
        paragraph("No optimizer step has been recorded yet.")


def banner(diagnosis: Diagnosis) -> str:
    """The verdict in one word, and what is wrong in a few."""
    primary = diagnosis.primary
    kind = primary.severity.value if primary else "good" if diagnosis.verdict is Verdict.HEALTHY else "warning"
    words = what(primary) if primary else " ".join(diagnosis.unobserved)
    return (
        f'<div class="amp-wall {kind}" role="status"><b>{verdict_in_words(diagnosis.verdict)}</b>'
        f"<span>{as_html(words, 160)}</span></div>"
    )


def facts(seen: Overview, diagnosis: Diagnosis) -> list[Fact]:
    """How far it is, and how it goes."""
    loss = seen.loss
    is_finite = bool(loss.steps) and max(loss.nonfinite, default=-1) < loss.steps[-1]
    newest: Fact = ("newest loss", value(loss.values[-1])) if is_finite else ("newest loss", "not finite", "error")
    return [
        ("optimizer steps", count(seen.steps)),
        *(() if loss.is_empty else (newest,)),
        *((scale_tile(seen.scale, diagnosis.scale),) if seen.scale is not None else ()),
        (f"skipped ({count(seen.skipped, 'step')})", share(seen.skipped_share) if seen.steps else "none yet"),
    ]


wall_page()
