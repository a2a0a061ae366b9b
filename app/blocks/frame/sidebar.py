"""The side bar: which run is on screen, and whether it is still being written."""

from __future__ import annotations

import time

import streamlit as st
from data import loader
from data.run_places import Offer
from state.address import begin
from state.choice import choose

from ampscope.analysis.causes.catalogue import cause_in_words
from ampscope.errors import AmpscopeError
from ampscope.report.html.markup import as_html
from ampscope.report.numbers import since
from ampscope.report.safe_text import short
from blocks.frame import live


def choose_run(found: dict[str, Offer], *, verdict: bool = True) -> None:
    """Let the reader choose among ``found`` and open the choice.

    Args:
        found: What is on offer.
        verdict: Whether to tell what is wrong with it, which on a first look takes a while.

    Raises:
        RunError: the chosen run cannot be read; the others still can be chosen.
    """
    with st.sidebar:
        asked = st.query_params.get("run")
        key = choose("run", "Run", list(found), lambda key: _label(found[key]))
        begin(key, leaving=asked not in (None, key))
        loader.choose(found[key].path)
        live.part(_facts)
        if verdict:
            live.part(_verdict)
        live.follow()


def _label(offer: Offer) -> str:
    return f"{short(offer.key, 70)} (sample)" if offer.is_sample else short(offer.key, 80)


def _verdict(run: loader.Loaded) -> None:
    """The verdict in a few words, on every page."""
    try:
        diagnosis = run.diagnosis()
    except AmpscopeError:
        return  # the page says so
    primary = diagnosis.primary
    kind = primary.severity.value if primary else "good"
    words = cause_in_words(primary.cause) if primary else ""
    when_judged = f'<div class="amp-place">judged after step {diagnosis.run.steps:,}</div>' if run.is_open else ""
    st.html(f'<span class="amp-chip {kind}">{diagnosis.verdict.value}</span> {as_html(words)}{when_judged}')


def _facts(run: loader.Loaded) -> None:
    words = {
        "open": "Being written now",
        "closed": "Finished",
        "interrupted": "Its process died; what it wrote until then is here",
    }
    started = f"Started {since(run.created, time.time())}" if run.created else ""
    lines = [words.get(run.status, run.status), started]
    st.html("".join(f'<div class="amp-place">{as_html(line)}</div>' for line in lines if line))
