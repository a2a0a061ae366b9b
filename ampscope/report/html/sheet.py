"""The style sheets beside this module, with the colours that they name."""

from __future__ import annotations

import re
from importlib.resources import files

from ampscope.report.palette import css_variables

_COMMENT = re.compile(r"/\*.*?\*/\s*", re.DOTALL)
_RULE, _CLASS = re.compile(r"([^{}]+)\{[^{}]*\}"), re.compile(r"\.([a-zA-Z][\w-]*)")
#: Blanks that separate nothing: those around brackets, colons before a value, commas and ends of lines.
_BLANK = re.compile(r"(?<=[{};,])\s+|\s+(?=[{}])|(?<=:) +(?=[^{}]*[;}])")


def style_of(name: str) -> str:
    """The style sheet ``name``, without its comments and blanks that separate nothing."""
    return _BLANK.sub("", _COMMENT.sub("", files(__package__).joinpath(f"{name}.css").read_text("utf-8")))


def style_for(style: str, body: str) -> str:
    """A style sheet without the rules that name classes of which none occurs in ``body``."""

    def kept(rule: re.Match[str]) -> str:
        classes = _CLASS.findall(rule[1])
        return rule[0] if not classes or any(name in body for name in classes) else ""

    return _RULE.sub(kept, style)


#: What every piece of HTML needs that this room gives.
SHEET = css_variables() + style_of("style")
