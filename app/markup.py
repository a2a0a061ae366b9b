"""Names from a trace made harmless, as in the report."""

from ampscope.report.html.markup import ELLIPSIS, as_code, as_html, as_label, as_source, short

__all__ = ["ELLIPSIS", "as_code", "as_html", "as_label", "as_source", "short"]
