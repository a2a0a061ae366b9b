"""Parts of a page behind tabs; which one is open is in the address."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import streamlit as st

from state.query_params import get_param, set_choice

_NAME = "tab"


def tabs(key: str, parts: Mapping[str, Callable[[], None]]) -> None:
    """Each part behind a tab of its name; the first is open unless the address asks for another.

    Args:
        key: The element's.
        parts: What draws each part, by our own words for it; not empty.
    """
    names = {_in_address(words): words for words in parts}
    asked = get_param(_NAME)
    is_own = st.session_state.get(f"_chosen_{_NAME}") == asked  # what was clicked here, not a link
    if asked in names and not (is_own and key in st.session_state):
        st.session_state[key] = names[asked]
    drawn = st.tabs(list(parts), key=key, on_change="rerun")
    for tab, draw in zip(drawn, parts.values(), strict=True):
        if tab.open:  # a click on another draws the page again
            with tab:
                draw()
    chosen = next((name for name, tab in zip(names, drawn, strict=True) if tab.open), next(iter(names)))
    set_choice(is_default=chosen == next(iter(names)), tab=chosen)
    st.session_state[f"_chosen_{_NAME}"] = chosen


def _in_address(words: str) -> str:
    return re.sub(r"\W+", "-", words.lower(), flags=re.ASCII).strip("-")
