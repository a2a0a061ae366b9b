"""A select box whose choice is a query parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import streamlit as st

from blocks.choices.not_there import not_there
from state.query_params import get_param, param_in_address, set_choice


def choose(
    name: str,
    label: str,
    options: Sequence[str],
    describe: Callable[[str], str],
    *,
    default: str | None = None,
    named: bool = False,
    width: Literal["stretch"] | int = "stretch",
    bare: bool = False,
    chips: bool = False,
) -> str:
    """A select box over ``options`` (not empty); an address that does not name one means the default, and stays so.

    Each writing of the address is an entry of the browser's history, to which Back would lead first.

    Args:
        name: The query parameter.
        label: What is said beside it.
        options: What can be chosen.
        describe: An option in words.
        default: What is chosen at first; the first option if left out.
        named: Write the default into the address, too, where another time it may be another.
        width: In pixels; beside others in a row, one that no longer fits begins the next line.
        bare: Whether what is said beside it is for those alone who do not see it.
        chips: Whether the options stand side by side.
    """
    begin = default if default is not None and default in options else options[0]
    asked = get_param(name)
    own = st.session_state.get(f"_chosen_{name}") == asked  # what the box itself wrote, not a link
    if asked in options and not (own and name in st.session_state):
        st.session_state[name] = asked
    known = st.session_state.get(name)
    if chips and known is None:  # a click on the chip that was chosen
        known = st.session_state.get(f"_chosen_{name}")
    if asked is None and known == st.session_state.get(f"_chosen_{name}"):
        known = begin  # nobody has picked it just now: it is of another run, or of what Back has left
    # Written even where it stays: a box of this name on the last page hands its choice on to the one of this page.
    st.session_state[name] = known if known in options else begin
    shown: Literal["collapsed", "visible"] = "collapsed" if bare else "visible"
    if chips:
        picked = st.segmented_control(label, options, format_func=describe, key=name, label_visibility=shown)
    else:
        picked = st.selectbox(label, options, format_func=describe, key=name, width=width, label_visibility=shown)
    chosen = picked if picked is not None and picked in options else begin
    if param_in_address(name) is not None and asked not in options and not own:
        not_there(label, asked, describe(chosen))
    set_choice(is_default=chosen == begin and not named, **{name: chosen})
    st.session_state[f"_chosen_{name}"] = chosen
    return chosen


def choose_optimizer(numbers: Sequence[int]) -> int | None:
    """A select box over a run's optimizers where there are several."""
    if len(numbers) < 2:
        return None
    return int(choose("optimizer", "Optimizer", [str(number) for number in numbers], lambda name: f"Optimizer {name}"))
