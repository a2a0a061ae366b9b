"""The side bar: which run is on screen, and whether it is still being written."""

from __future__ import annotations

import time
from pathlib import Path

import loader
import streamlit as st
from choice import choose
from markup import as_html, short
from phrases import ago, when
from runs import Offer
from story import begin

from ampscope.trace.manifest import Manifest
from ampscope.trace.reader import open_run

#: Seconds between two looks at a run that is being written.
LOOK_EVERY = 5


def choose_run(found: dict[str, Offer]) -> None:
    """Let the reader choose among ``found`` and open the choice.

    Raises:
        RunError: the chosen run cannot be read; the others still can be chosen.
    """
    with st.sidebar:
        asked = st.query_params.get("run")
        key = choose("run", "Run", list(found), lambda key: _label(found[key]))
        begin(key, leaving=asked not in (None, key))
        loaded = loader.choose(found[key].path)
        with open_run(loaded.path) as run:
            manifest, status = run.manifest, run.status
        _facts(manifest, status)
        if status == "open":
            _follow(loaded)


def _label(offer: Offer) -> str:
    return f"{short(offer.key, 70)} (sample)" if offer.is_sample else short(offer.key, 80)


def _facts(manifest: Manifest, status: str) -> None:
    words = {
        "open": "Being written now",
        "closed": "Finished",
        "interrupted": "Its process died; what it wrote until then is here",
    }
    started = f"Started {when(manifest.created, time.time())}" if manifest.created else ""
    lines = [words.get(status, status), started]
    st.html("".join(f'<div class="amp-place">{as_html(line)}</div>' for line in lines if line))


@st.fragment(run_every=LOOK_EVERY)
def _follow(loaded: loader.Loaded) -> None:
    """How old the newest row is, looked up every few seconds, and a button to show it."""
    last = loaded.overview().last_time
    fresh = loader.stamp_of(Path(loaded.path)) != loaded.stamp
    age = f"Last step on this page: {ago(time.time() - last)}" if last else "No step yet"
    st.html(f'<div class="amp-place">{as_html(age)}{"<br>There are newer rows." if fresh else ""}</div>')
    if st.button("Show the newest", type="primary" if fresh else "secondary"):
        st.rerun()
