"""An HTML file has a head, style sheets with the palette's colours for screen and paper, and sections."""

from __future__ import annotations

import re
from importlib.resources import files

from ampscope.report.html.markup import as_html
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


#: Nothing is loaded and nothing runs, whatever a trace put into a name.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_STYLE = style_of("document")


def document(title: str, body: str) -> str:
    """A whole HTML file; ``title`` is plain text, ``body`` HTML."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{as_html(title, 120)}</title>\n<style>{style_for(SHEET + _STYLE, body)}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def section(title: str, content: str, *, level: int = 2, on_paper: bool = True) -> str:
    """``content`` under our own words; nothing where there is none.

    Args:
        title: The words.
        content: HTML.
        level: Of the heading.
        on_paper: Whether it is on the page that is printed.
    """
    kind = "" if on_paper else ' class="amp-on-screen"'
    return f"<section{kind}>\n<h{level}>{as_html(title)}</h{level}>\n{content}\n</section>\n" if content else ""


def paragraph(text: str) -> str:
    """Plain text as a paragraph."""
    return f"<p>{as_html(text, 4000)}</p>" if text else ""
