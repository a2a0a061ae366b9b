"""The frame of an HTML file: its head, its style for screen and paper, light and dark, and its sections."""

from __future__ import annotations

from ampscope.report.html.markup import as_html
from ampscope.report.html.sheet import SHEET

#: Nothing is loaded and nothing runs, whatever a trace put into a name.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0; font: 16px/1.5 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; color: #1b232c;
  background: #ffffff; overflow-wrap: anywhere; }
main { max-width: 1060px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 1.9rem; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 1.35rem; margin: 40px 0 12px; padding-top: 16px; border-top: 1px solid rgba(128,128,128,0.35); }
h3 { font-size: 1.05rem; margin: 24px 0 8px; }
p { margin: 0 0 8px; }
pre { margin: 6px 0 0; user-select: all; }
.amp-card, .amp-tiles { margin: 16px 0; }
@media (prefers-color-scheme: dark) { body { color: #e6eaee; background: #0f151b; } }
@media print {
  body { color: #000000; background: #ffffff; font-size: 11pt; print-color-adjust: exact;
    -webkit-print-color-adjust: exact; }
  main { max-width: none; padding: 0; }
  .amp-card, .amp-tile, .amp-module, .amp-operand, .amp-remedies li, .amp-plot { break-inside: avoid; }
  h2, h3, .amp-panel-name { break-after: avoid; }
  details::details-content { content-visibility: visible; block-size: auto; }
}
"""


def document(title: str, body: str) -> str:
    """A whole HTML file; ``title`` is plain text, ``body`` HTML."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{as_html(title, 120)}</title>\n<style>{SHEET}{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def section(title: str, content: str, *, level: int = 2) -> str:
    """``content`` under our own words; nothing where there is none."""
    return f"<section>\n<h{level}>{as_html(title)}</h{level}>\n{content}\n</section>\n" if content else ""


def paragraph(text: str) -> str:
    """Plain text as a paragraph."""
    return f"<p>{as_html(text, 4000)}</p>" if text else ""
