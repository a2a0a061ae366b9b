"""Begins each visit of the app: choose a run in the side bar, then read its pages."""

from __future__ import annotations

from functools import partial

import streamlit as st

from ampscope.errors import AmpscopeError
from blocks.other_runs import await_runs, other_runs, samples_only, unreachable, welcome
from blocks.sidebar import label_tab, last_tab, page_of, side_bar, tab_of, unreadable_side_bar
from blocks.text import alarm
from blocks.top_bar import top_bar
from data.ahead import look_ahead
from data.run_folders import offered_runs, run_folders, unreachable_folders
from data.run_snapshot import current_run
from state import Page, params_written_once

#: Pixels: the names of the pages, and no more.
_SIDE_BAR = 208

st.set_page_config(*last_tab(), layout="wide", initial_sidebar_state=_SIDE_BAR)
shown = st.navigation([page_of(one) for one in Page], position="hidden")  # links of ours name the run
page = next(one for one in Page if one.url_path == shown.url_path)
folders = run_folders()
offered = offered_runs(folders)
await_runs(offered, partial(offered_runs, folders))
silent = unreachable_folders(folders)
if not offered:
    unreachable(silent)
    welcome(folders)
    st.stop()
with params_written_once(page.url_path):
    try:
        try:
            top_bar(offered, page)
        except AmpscopeError:
            unreadable_side_bar()
            raise
        side_bar(with_verdict=page is not Page.RUNS)
        unreachable(silent)
        if all(run.is_sample for run in offered.values()):
            samples_only([folder for folder in folders if folder not in silent])
        other_runs(offered)
        label_tab(tab_of(current_run(), with_verdict=page is not Page.RUNS))
        shown.run()
        look_ahead(current_run())
    except AmpscopeError as error:
        alarm("This run cannot be shown", str(error))
        if page is Page.RUNS:
            shown.run()
