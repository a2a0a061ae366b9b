"""The pages as the side bar offers them."""

from __future__ import annotations

import streamlit as st
from streamlit.navigation.page import StreamlitPage

from state.pages import Page


def page_of(page: Page, world: int) -> StreamlitPage:
    """A page for the navigation; one with nothing on it for a run of ``world`` ranks is not in the list."""
    return st.Page(
        page.file,
        title=page.title,
        icon=page.icon,
        default=page.is_default,
        visibility="visible" if page.is_offered(world) else "hidden",
    )
