"""Serves the app: what ``python -m streamlit`` does, without its look-up of this machine's address outside."""

from __future__ import annotations

from streamlit.web.cli import main

from data.address_lookup import never_look_up

if __name__ == "__main__":
    never_look_up()
    main(prog_name="streamlit")
