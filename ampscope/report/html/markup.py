"""Names and source lines from a trace made harmless: they are shown as text, whatever they contain."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

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
