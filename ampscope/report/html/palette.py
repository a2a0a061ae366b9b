"""Every colour of the pages and what it means: told apart by colour-blind eyes, legible on light and on dark."""

from __future__ import annotations

from ampscope.trace.vocabulary import Severity

#: One colour per dtype (Okabe and Ito, 2008, cool half).
DTYPES = {
    "float16": "#56B4E9",
    "bfloat16": "#009E73",
    "float32": "#0072B2",
    "float64": "#CC79A7",
}
OTHER_DTYPE = "#9AA0A6"

#: One colour per severity (the warm half), so that no dtype looks like an alarm.
SEVERITIES = {
    Severity.ERROR: "#D55E00",
    Severity.WARNING: "#E69F00",
    Severity.INFO: "#8A94A0",
}
ALARM = SEVERITIES[Severity.ERROR]
GOOD = "#009E73"

#: Curves carry no meaning by colour.
CURVE = "#7A8CA3"
MARK = "#8A94A0"
#: Lines and surfaces that must show on both themes.
HAIRLINE = "rgba(128,128,128,0.35)"
SHADE = "rgba(128,128,128,0.14)"
ALARM_SHADE = "rgba(213,94,0,0.16)"
WARNING_SHADE = "rgba(230,159,0,0.16)"


def dtype_color(dtype: str) -> str:
    """The colour that stands for ``dtype`` everywhere."""
    return DTYPES.get(dtype, OTHER_DTYPE)


def ink_on(dtype: str) -> str:
    """The text colour that reads best on a dtype's colour."""
    return "#FFFFFF" if dtype in ("float32", "bfloat16") else "#10161D"
