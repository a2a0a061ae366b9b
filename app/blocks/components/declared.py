"""Components are declared by what lies in their folder: a style sheet and scripts, which make elements in one way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import streamlit as st

if TYPE_CHECKING:
    from streamlit.components.v2.types import ComponentRenderer

_ELEMENT = Path(__file__).with_name("element.js")


def declared(
    beside: str, name: str, html: str, scripts: Sequence[str] = (), *, isolate_styles: bool = True
) -> ComponentRenderer:
    """Declares a component of our own by the files in its folder.

    Args:
        beside: The file that declares it; the others lie in the same folder.
        name: What it is called, as its style sheet is.
        html: What it begins with.
        scripts: Of its scripts, each uses those before it; by default there is one, of its own name.
        isolate_styles: Whether the page's style sheets do not reach it.
    """
    folder = Path(beside).parent
    files = [_ELEMENT, *(folder / f"{script}.js" for script in scripts or (name,))]
    return st.components.v2.component(
        f"ampscope.{name}",
        html=html,
        css=(folder / f"{name}.css").read_text("utf-8"),
        js="\n".join(file.read_text("utf-8") for file in files),
        isolate_styles=isolate_styles,
    )
