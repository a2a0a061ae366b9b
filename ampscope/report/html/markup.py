"""HTML files have a head, style sheets and sections; names and source lines from a trace are harmless in them."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

from ampscope.report.palette import css_variables
from ampscope.report.safe_text import short, visible_lines

if TYPE_CHECKING:
    from ampscope.analysis.results import SourceLine

#: In code that is HTML, where a line may end; never within ``&lt;``.
_BREAKS = re.compile(r"[(\[{,.=](?=[\w(\[{*\"'-])")


def as_source(text: str, limit: int = 4000) -> str:
    """Program text for a code block: its lines kept, what would reorder or hide them made visible."""
    return "\n".join(visible_lines(text[:limit]))


def as_html(text: str, limit: int = 400) -> str:
    """``text`` for the inside of an HTML element or attribute."""
    return html.escape(short(text, limit))


def link_html(address: str, inside: str) -> str:
    """A link to a page of ours, on the same tab; ``inside`` is HTML. Without an address it stays what it is."""
    if not address or not inside:
        return inside
    return f'<a class="amp-go" href="{html.escape(address)}" target="_self">{inside}</a>'


def labels_html(labels: Iterable[tuple[float, str]]) -> str:
    """Paints labels along an axis, each at its place in percent of the width."""
    return "".join(f'<span style="left:{at:.2f}%">{as_html(words)}</span>' for at, words in labels)


def as_code(text: str, limit: int = 4000) -> str:
    """Several lines for the inside of an element that keeps them."""
    return html.escape(as_source(text, limit))


def as_label(text: str, limit: int = 48) -> str:
    """``text`` for a Plotly label or hover: Plotly reads a subset of HTML there, and TeX between dollars."""
    return html.escape(short(text, limit), quote=False).replace("$", "&#36;")


def source_html(source: SourceLine | None, *, hit: bool = False) -> str:
    """One line with where it stands."""
    if source is None:
        return '<span class="amp-place">No line of yours is known for it.</span>'
    code = f'<div class="amp-code{" hit" if hit else ""}">{_code(source.code.strip())}</div>' if source.code else ""
    return f'<span class="amp-place">{_where(source)}</span>{code}'


def listing(lines: Sequence[SourceLine], source: SourceLine, *, calm: bool = False, placed: bool = True) -> str:
    """Lines of one function by number, ``source`` highlighted; what the trace does not hold is an ellipsis.

    Args:
        lines: The lines, in order.
        source: The line that they are shown for.
        calm: Whether it is no alarm.
        placed: Whether to say where it stands.
    """
    drawn = "".join(_numbered(lines, source.line))
    kind = "amp-listing calm" if calm else "amp-listing"
    stands = f'<span class="amp-place">{_where(source)}</span>' if placed else ""
    return f'{stands}<div class="{kind}">{drawn}</div>'


def _code(line: str) -> str:
    """A line, which breaks between its words where the window is narrow, not within them."""
    return _BREAKS.sub(r"\g<0><wbr>", as_code(line, 400))


def _where(source: SourceLine) -> str:
    function = f" in {source.function}" if source.function else ""
    return as_html(f"{short(source.file, 120)}:{source.line}{short(function, 80)}", 240)


def _numbered(lines: Sequence[SourceLine], hit: int) -> Iterator[str]:
    before = None
    for each in lines:
        if before is not None and each.line > before + 1:
            yield '<span class="amp-number"></span><span class="amp-gap">&#8943;</span>'
        kind = ' class="hit"' if each.line == hit else ""
        yield f'<span class="amp-number">{each.line}</span><code{kind}>{_code(each.code.rstrip())}</code>'
        before = each.line


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
