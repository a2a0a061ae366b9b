"""Overview: is the run healthy, and if not, what to change?"""

from __future__ import annotations

from functools import partial

import loader
import streamlit as st
from blocks.items import item_link, item_list, items
from blocks.links import to_usage
from blocks.notes import heading, page_head, paragraph
from blocks.plot import plot
from blocks.tiles import tiles
from blocks.verdict import verdict_card
from charts.timeline import timeline
from choice import choose_optimizer
from closer import report

from ampscope.report.html.tiles import run_tiles

run = loader.current()
diagnosis = run.diagnosis()
named = items(diagnosis)
page_head("Overview", diagnosis.run.name)

verdict_card(diagnosis)
with st.container(horizontal=True, vertical_alignment="center", gap="small"):
    if diagnosis.primary is not None:
        item_link(*next(iter(named.items())), "**Look at it closely**")
    if diagnosis.run.steps:
        to_usage()
    st.download_button(
        "Report to send on",
        partial(report, run.path),
        "report.html",
        "text/html",
        type="tertiary",
        icon=":material/download:",
        on_click="ignore",
        help="All of this as one HTML file that needs no server and no network",
    )

first = run.overview()
seen = run.overview(choose_optimizer(first.optimizers))
tiles(run_tiles(seen, diagnosis.run))

heading("Time line")
if seen.steps:
    plot(timeline(seen, list(named.values())), key="timeline")
    st.caption("Drag to zoom in, double-click to zoom out.")
else:
    paragraph("No optimizer step has been recorded yet.")

if named:
    heading("Everything noticed")
    item_list(named)
