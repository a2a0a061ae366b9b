"""The entry of the app: choose a run in the side bar, then read its pages."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import streamlit as st
from blocks.basics.notes import alarm
from blocks.basics.style import style
from blocks.frame.live import await_runs
from blocks.frame.sidebar import choose_run
from blocks.frame.welcome import samples_only, welcome
from data.run_listing import offered
from data.run_places import places
from state.address import address
from state.pages import Page

from ampscope.errors import AmpscopeError

#: A file of ours: an icon of Material Symbols or an emoji would be fetched from outside.
ICON = Path(__file__).with_name("icon.svg")

st.set_page_config(page_title="AMPscope", page_icon=str(ICON), layout="wide")
style()
page = st.navigation([st.Page(one.file, title=one.title, icon=one.icon, default=one is Page.OVERVIEW) for one in Page])
looked = places()
found = offered(looked)
await_runs(found, partial(offered, looked))
if not found:
    welcome(looked)
    st.stop()
with address():
    try:
        choose_run(found, verdict=page.url_path != "runs")
        if all(offer.is_sample for offer in found.values()):
            samples_only(looked)
        page.run()
    except AmpscopeError as error:
        alarm("This run cannot be shown", str(error))
        if page.url_path == "runs":
            page.run()
