"""Numbers for people, as in the report."""

from ampscope.report.html.phrases import (
    UNMEASURED,
    ago,
    count,
    part,
    seconds,
    share,
    size,
    span,
    trouble,
    value,
    when,
)

__all__ = [
    "UNMEASURED",
    "ago",
    "count",
    "part",
    "seconds",
    "share",
    "size",
    "span",
    "trouble",
    "value",
    "when",
]
