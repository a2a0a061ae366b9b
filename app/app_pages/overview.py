"""Overview: is the run healthy, and if not, what to change?"""

from __future__ import annotations

import loader
import streamlit as st
from blocks.items import item_link, item_list, items
from blocks.notes import heading, page_head, paragraph
from blocks.plot import plot
from blocks.tiles import tiles
from blocks.verdict import verdict_card
from charts.timeline import timeline
from choice import choose_optimizer
from markup import short
from phrases import count, seconds, share

from ampscope.analysis.overview import Overview
from ampscope.analysis.results import RunInfo
from ampscope.analysis.scale_words import in_words
from ampscope.report import figures


def facts(seen: Overview, info: RunInfo) -> list[tuple[str, str]]:
    """The tiles, most asked first."""
    versions = [f"{name} {version}" for name, version in info.versions.items() if name in ("torch", "python")]
    return [
        ("optimizer steps tried", count(seen.steps)),
        (f"skipped ({figures.count(seen.skipped, 'step')})", share(seen.skipped_share) if seen.steps else "none yet"),
        ("loss scale now", in_words(seen.scale) if seen.scale is not None else "none"),
        (f"cost of observing (a step takes {seconds(seen.step_seconds)})", share(seen.observing_share)),
        (f"{count(info.parameters)} parameters", short(info.model, 40) or "unnamed model"),
        (short(", ".join(versions), 60) or "versions unknown", short(info.device, 40) or "device unknown"),
    ]


run = loader.current()
diagnosis = run.diagnosis()
named = items(diagnosis)
page_head("Overview", diagnosis.run.name)

verdict_card(diagnosis)
if diagnosis.primary is not None:
    item_link(*next(iter(named.items())), "Look at it closely")

first = run.overview()
seen = run.overview(choose_optimizer(first.optimizers))
tiles(facts(seen, diagnosis.run))

heading("Time line")
if seen.steps:
    plot(timeline(seen, list(named.values())), key="timeline")
    st.caption("Drag to zoom in, double-click to zoom out.")
else:
    paragraph("No optimizer step has been recorded yet.")

if named:
    heading("Everything noticed")
    item_list(named)
