"""What to do where no step was traced op by op."""

from __future__ import annotations

import streamlit as st

from blocks.basics.text import paragraph


def how_to_trace() -> None:
    """Say that nothing was traced, and which line traces a step now and then."""
    paragraph("No step of this run was traced op by op. Trace one in every so many steps:")
    st.code("ampscope.watch(model, scaler, every=500)", language="python")
