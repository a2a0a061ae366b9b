"""Serves the app: what ``python -m streamlit`` does, without its look-up of this machine's address outside."""

from __future__ import annotations

import importlib
import threading

from streamlit.web.cli import main

from data.address_lookup import never_look_up

#: What the first page needs beside Streamlit: it is loaded while the browser opens, not while somebody waits for it.
FIRST_PAGE = ("blocks.frame.sidebar", "charts.stack", "data.run_results", "data.downloads", "plotly.graph_objects")


def load_first_page() -> None:
    """Load what the first page needs."""
    for name in FIRST_PAGE:
        importlib.import_module(name)


if __name__ == "__main__":
    never_look_up()
    threading.Thread(target=load_first_page, name="ampscope-load", daemon=True).start()
    main(prog_name="streamlit")
