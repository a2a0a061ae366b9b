"""Keeps Streamlit from asking a server outside for this machine's address when a foreign page sends a request."""

from __future__ import annotations

from streamlit import net_util


def never_look_up() -> None:
    """From here on Streamlit knows of no address outside that is this machine's; it refuses a foreign page at once."""
    net_util.get_external_ip = _unknown


def _unknown() -> None:
    """No address."""
