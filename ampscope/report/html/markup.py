"""Names from a trace made harmless: they are shown as text, whatever they contain."""

from __future__ import annotations

import html

from ampscope.report.safe_text import short, visible_lines


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
