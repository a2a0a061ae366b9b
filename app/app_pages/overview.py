"""Overview: is the run healthy, and if not, what to change?"""

from __future__ import annotations

from functools import partial

import streamlit as st
from blocks.basics.links import to_replay, to_scale, to_usage
from blocks.basics.notes import heading, page_head, paragraph
from blocks.basics.plot import plot_of_steps
from blocks.basics.tiles import tiles
from blocks.frame import live
from blocks.verdict.card import verdict_card
from blocks.verdict.items import item_link, item_list, items
from charts.stack import stack_figure
from data import loader
from data.takeaways import report
from state.address import told
from state.choice import choose_optimizer
from state.pages import Page

from ampscope.analysis.results import Incident
from ampscope.report.figures.over_steps import timeline_stack
from ampscope.report.html.parts.tiles import run_tiles


def verdict(run: loader.Loaded) -> None:
    """The card, and where to go from it."""
    diagnosis = run.diagnosis()
    verdict_card(diagnosis)
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        primary = diagnosis.primary
        if primary is not None:
            item_link(*next(iter(items(diagnosis).items())), "**Look at it closely**")
        if isinstance(primary, Incident) and primary.path and primary.traced:
            to_replay(primary.step, primary.traced, primary.path[0].seq, "Replay it")
        if primary is not None and run.overview().scale is not None:
            to_scale(primary.step, "The loss scale then")
        if diagnosis.run.steps:
            to_usage()
        st.download_button(
            "Report to send on",
            partial(report, run),
            "report.html",
            "text/html",
            type="tertiary",
            icon=":material/download:",
            on_click="ignore",
            help="All of this as one HTML file that needs no server and no network",
        )


def history(run: loader.Loaded, optimizer: int | None) -> None:
    """The tiles and the time line."""
    seen, diagnosis = run.overview(optimizer), run.diagnosis()
    tiles(run_tiles(seen, diagnosis.run))
    heading("Time line")
    if seen.steps:
        step = plot_of_steps(stack_figure(timeline_stack(seen, list(items(diagnosis).values()))), key="timeline")
        onward = ", click a mark to see that step" if seen.scale is not None else ""
        st.caption(f"Drag to zoom in, double-click to zoom out{onward}.")
        if step is not None and seen.scale is not None:
            st.switch_page(Page.SCALE.file, query_params={"run": told("run") or "", "step": str(step)})
    else:
        paragraph("No optimizer step has been recorded yet.")


def noticed(run: loader.Loaded) -> None:
    """Everything noticed, each a link."""
    if named := items(run.diagnosis()):
        heading("Everything noticed")
        item_list(named)


run = loader.current()
page_head("Overview", run.diagnosis().run.name)
live.part(verdict)
live.part(partial(history, optimizer=choose_optimizer(run.overview().optimizers)))
live.part(noticed)
