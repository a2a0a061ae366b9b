"""Notices, while a page stays open, that another run has begun."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import streamlit as st

#: Seconds between two looks for new runs.
LOOK_EVERY = 10


def await_runs(offered: Mapping[str, object], look: Callable[[], Mapping[str, object]]) -> None:
    """Draw the whole page again once ``look`` finds other runs than those ``offered``: the next training has begun."""

    def look_again() -> None:
        if look().keys() != offered.keys():
            st.rerun()

    st.fragment(look_again, run_every=LOOK_EVERY)()
