"""The pages as the side bar offers them."""

from __future__ import annotations

import streamlit as st
from streamlit.navigation.page import StreamlitPage

from blocks.basics.page_links import kept_query
from blocks.components.habits.listeners import draw_again, fold_side_bar
from state.pages import Page


def page_of(page: Page) -> StreamlitPage:
    """A page for Streamlit, which knows its address by it."""
    return st.Page(page.file, title=page.title, icon=page.icon, default=page.is_default)


def page_links(run: str, world: int) -> None:
    """The pages that there are for a run of ``world`` ranks: links that name the run by its key, and what is kept."""
    with st.container(gap="xsmall", key="amp-pages"):
        for page in Page:
            if page.is_offered(world):
                st.page_link(page.file, label=page.title, icon=page.icon, query_params={**kept_query(), "run": run})
    fold_side_bar()
    draw_again()
