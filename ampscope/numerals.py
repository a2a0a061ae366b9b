"""Numbers as text: terminal, app, report and code to paste spell them alike.

Numbers have four significant digits; from 1,000 to a million they are whole, with thousands separated; beyond, and
below 0.0001, they have an exponent as Python reads it, ``6.104e-5``.
"""

from __future__ import annotations

import math

#: From here on thousands are separated, from here on a number's digits say less than its size.
_THOUSAND, _MILLION = 1e3, 1e6
_DIGITS, _EXACT = 4, 17


def number(value: float, digits: int = _DIGITS) -> str:
    """``65,504``, ``0.9985``, ``6.104e-5``, ``NaN``, ``-inf``; what is not 1 has the digits that say so.

    Args:
        value: The number.
        digits: How many significant digits it has at the most; what is below a million is whole all the same.
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{value:g}"
    if abs(float(f"{value:.{digits}g}")) >= _THOUSAND and abs(value) < _MILLION - 0.5:
        whole = len(f"{abs(value):.0f}")
        text = f"{value:,.{max(digits - whole, 0)}f}"
        return text.rstrip("0").removesuffix(".") if "." in text else text
    told = (f"{value:.{enough}g}" for enough in range(digits, _EXACT + 1))
    short = next(text for text in told if abs(value) == 1 or abs(float(text)) != 1)
    mantissa, exponent, power = short.partition("e")
    return f"{mantissa}e{int(power)}" if exponent else mantissa


def in_code(value: float) -> str:
    """`number` as Python reads it: without separators."""
    return number(value).replace(",", "")
