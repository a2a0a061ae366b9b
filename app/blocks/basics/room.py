"""Keeps room for what is drawn later than what is below it, so that nothing moves when it comes."""

from __future__ import annotations

import re

import streamlit as st


def keep_room(key: str, pixels: int) -> None:
    """The element or container with ``key`` is at least so tall, from the beginning on."""
    name = re.sub(r"[^a-zA-Z0-9_-]", "-", key.strip())
    st.html(f"<style>.st-key-{name} {{ min-height: {pixels}px; }}</style>")
