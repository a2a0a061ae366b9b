"""Choices that live in the page's address, so that a link shows what its sender saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import streamlit as st
from markup import as_html


def choose(name: str, label: str, options: Sequence[str], describe: Callable[[str], str]) -> str:
    """A select box over ``options`` (not empty); an address that names none of them gets the first."""
    asked = st.query_params.get(name)
    own = st.session_state.get(f"_seen_{name}") == asked  # what the box itself wrote, not a link
    if asked in options and not (own and name in st.session_state):
        st.session_state[name] = asked
    if st.session_state.get(name) not in options:
        st.session_state[name] = options[0]
    picked = st.selectbox(label, options, format_func=describe, key=name)
    chosen = picked if picked in options else options[0]
    if asked is not None and asked not in options and not own:
        missing(label, asked, describe(chosen))
    st.query_params[name] = st.session_state[f"_seen_{name}"] = chosen
    return chosen


def missing(label: str, asked: str, instead: str) -> None:
    """Say that what a link asked for is not there."""
    told = f"{label}: there is no {asked} here; this is {instead}."
    st.html(f'<div class="amp-place">{as_html(told, 240)}</div>')


def choose_optimizer(numbers: Sequence[int]) -> int | None:
    """A select box over a run's optimizers where there are several."""
    if len(numbers) < 2:
        return None
    return int(choose("optimizer", "Optimizer", [str(number) for number in numbers], lambda name: f"Optimizer {name}"))
