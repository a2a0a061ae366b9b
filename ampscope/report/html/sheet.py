"""The style sheets beside this module, with the colours that they name."""

from __future__ import annotations

import re
from importlib.resources import files

from ampscope.report.palette import css_variables

_COMMENT = re.compile(r"/\*.*?\*/\s*", re.DOTALL)


def style_of(name: str) -> str:
    """The style sheet ``name``, without its comments."""
    return _COMMENT.sub("", files(__package__).joinpath(f"{name}.css").read_text("utf-8"))


#: What every piece of HTML needs that this room gives.
SHEET = css_variables() + style_of("style")
