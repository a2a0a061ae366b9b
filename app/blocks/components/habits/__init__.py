"""Defines components that listen to the page and show nothing themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import streamlit as st


def _listener(name: str) -> Callable[[], object]:
    """Makes a component that listens as the JavaScript file ``name`` says, for as long as it is on the page."""
    js = Path(__file__).with_name(f"{name}.js").read_text("utf-8")
    component = st.components.v2.component(f"ampscope.{name}", html="<span></span>", js=js)
    return lambda: component(key=name, height=0)


#: A click on a link in the side bar folds it where it lies over the page.
fold_side_bar = _listener("side_bar_fold")
#: The keys that the page's buttons name work right after a choice in a select box.
release_keyboard = _listener("keyboard_release")
#: A page that an answer to the one before has taken off the screen is drawn again.
draw_again = _listener("blank_page")
