"""The style sheet of the app: the report's, and what fits Streamlit's own elements to it."""

from __future__ import annotations

from pathlib import Path

from ampscope.report.html.document import SHEET

#: It is in the page before anything is drawn.
STYLE = SHEET + "".join(Path(__file__).with_name(f"{name}.css").read_text("utf-8") for name in ("style", "wall"))
