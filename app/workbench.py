"""What each visit of the app begins with: choose a run in the side bar, then read its pages."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import streamlit as st

from ampscope.errors import AmpscopeError
from blocks.basics.style import style
from blocks.basics.text import alarm
from blocks.frame.navigation import page_of
from blocks.frame.new_runs import await_runs
from blocks.frame.other_runs import other_runs
from blocks.frame.sidebar import choose_run
from blocks.frame.tab_title import tab_title
from blocks.frame.welcome import samples_only, welcome
from data.current_run import current_run
from data.run_folders import offered_runs, run_folders
from state.pages import Page
from state.query_params import params_written_once

#: A file of ours: an icon of Material Symbols or an emoji would be fetched from outside.
ICON = Path(__file__).with_name("icon.svg")

st.set_page_config(page_title="AMPscope", page_icon=str(ICON), layout="wide")
style()
page = st.navigation([page_of(one) for one in Page], position="hidden")  # links of ours name the run
is_run_list = page.url_path == Page.RUNS.url_path
folders = run_folders()
offered = offered_runs(folders)
await_runs(offered, partial(offered_runs, folders))
if not offered:
    welcome(folders)
    st.stop()
with params_written_once(page.url_path):
    try:
        choose_run(offered, with_verdict=not is_run_list)
        if all(run.is_sample for run in offered.values()):
            samples_only(folders)
        other_runs(offered)
        st.set_page_config(page_title=tab_title(current_run(), with_verdict=not is_run_list))
        page.run()
    except AmpscopeError as error:
        alarm("This run cannot be shown", str(error))
        if is_run_list:
            page.run()
