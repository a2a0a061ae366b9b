"""Replay: a traced step op by op, in the order in which it ran."""

from __future__ import annotations

import loader
import streamlit as st
from blocks.notes import page_head, paragraph
from choice import choose_traced

run = loader.current()
page_head("Replay", run.diagnosis().run.name)
newest = run.precision()
if not newest.traced:
    paragraph("No step of this run was traced op by op. Trace one in every so many steps:")
    st.code("ampscope.watch(model, scaler, every=500)", language="python")
    st.stop()
chosen = choose_traced(newest.traced)
