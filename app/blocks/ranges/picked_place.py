"""The place that is looked at, and the step: by the address, or by a click."""

from __future__ import annotations

import streamlit as st

from ampscope.analysis.precision.ranges.measured import MeasuredRun
from blocks.choices.not_there import not_there
from state.query_params import get_number, param_in_address, set_params

_PICKED = "_ranges_picked"


def pick(place: str, step: int | None) -> None:
    """Note a click: it takes effect when the page is drawn next."""
    st.session_state[_PICKED] = place, step


def take_pick() -> tuple[str, int | None] | None:
    """Returns the place that was clicked since the page was drawn, once; None without a click."""
    picked = st.session_state.pop(_PICKED, None)
    return picked if isinstance(picked, tuple) else None


def picked_place(found: MeasuredRun, closest: str) -> tuple[str, int | None]:
    """The key of the place to look at, and the step if one was asked for.

    Args:
        found: All places.
        closest: The key of the place to begin with.
    """
    if (picked := take_pick()) is not None:
        set_params(place=picked[0], step=picked[1])
    asked = param_in_address("place")
    if asked is not None and any(each.place.key == asked for each in found.places):
        return asked, get_number("step")
    if asked is not None:
        not_there("Place", asked, "the closest one")
    return closest, None
