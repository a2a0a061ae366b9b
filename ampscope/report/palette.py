"""Every colour and what it means: for pages, reports and figures, told apart by colour-blind eyes.

All but ink and paper are legible on light and on dark.
"""

from __future__ import annotations

from collections.abc import Mapping

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

#: Of a heat map: the fuller, the closer; laid over the page with more or less of it, it reads on light and on dark.
HEAT = "#8F5FD7"
#: Curves carry no meaning by colour.
CURVE = "#7A8CA3"
OTHER_CURVE = "#9467BD"
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
    return "#FFFFFF" if dtype == "float32" else "#10161D"


#: What stands above a rule for a theme, and the ink and the paper of a file that no page surrounds.
_THEMES = (
    ("", "#1b232c", "#ffffff"),
    ("@media (prefers-color-scheme: dark)", "#e6eaee", "#0f151b"),
    ("@media print", "#000000", "#ffffff"),
)
_NAMES = {
    "alarm": ALARM,
    "warning": SEVERITIES[Severity.WARNING],
    "info": SEVERITIES[Severity.INFO],
    "good": GOOD,
    "heat": HEAT,
    "curve": CURVE,
    "other": OTHER_CURVE,
    "mark": MARK,
    "hairline": HAIRLINE,
    "shade": SHADE,
    "alarm-shade": ALARM_SHADE,
    "warning-shade": WARNING_SHADE,
}


def css_variables() -> str:
    """The colours as CSS custom properties, ``--amp-alarm`` and so on, which a style sheet refers to."""
    rules = [_root(_NAMES)]
    for condition, ink, paper in _THEMES:
        rule = _root({"ink": ink, "paper": paper})
        rules.append(f"{condition} {{ {rule} }}" if condition else rule)
    return "\n".join([*rules, ""])


def _root(colors: Mapping[str, str]) -> str:
    return f":root {{ {' '.join(f'--amp-{name}: {color};' for name, color in colors.items())} }}"
