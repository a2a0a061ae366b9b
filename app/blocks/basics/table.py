"""A small table whose cells wrap and whose text is text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import streamlit as st

from ampscope.report.html.parts.table import table_html


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numeric: Collection[str] = (),
    links: Sequence[str] = (),
) -> None:
    """``rows`` under ``columns``; those named in ``numeric`` are set to the right, first cells lead to ``links``."""
    st.html(table_html(columns, rows, numeric=numeric, links=links))
