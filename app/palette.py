"""The colours of the app: those of the report."""

from ampscope.report.html.palette import (
    ALARM,
    ALARM_SHADE,
    CURVE,
    DTYPES,
    GOOD,
    HAIRLINE,
    MARK,
    OTHER_DTYPE,
    SEVERITIES,
    SHADE,
    WARNING_SHADE,
    dtype_color,
    ink_on,
)

__all__ = [
    "ALARM",
    "ALARM_SHADE",
    "CURVE",
    "DTYPES",
    "GOOD",
    "HAIRLINE",
    "MARK",
    "OTHER_DTYPE",
    "SEVERITIES",
    "SHADE",
    "WARNING_SHADE",
    "dtype_color",
    "ink_on",
]
