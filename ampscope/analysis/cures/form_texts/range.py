"""How forms of calls are told that are well in float32, and not in the range or the precision of a half dtype."""

from __future__ import annotations

from ampscope.analysis.cures.form_texts.form_text import FormText
from ampscope.analysis.results import FormTried
from ampscope.trace.schema import Form


def _number(value: float | None) -> str:
    """As code writes it: a bound next to 1 is not 1."""
    return f"{value:.12g}" if value is not None else ""


def _in_place_of(form: FormTried) -> str:
    return f"{_number(form.value)} in the place of {_number(form.was)}"


def _scaled(form: FormTried) -> str:
    return f"first factor of {form.call} multiplied by {_number(form.value)} before the product"


TEXTS: dict[str, FormText] = {
    Form.CONSTANT: FormText(
        lambda form: f"{_in_place_of(form)} in {form.call}",
        lambda form: f"Give {form.call} {_in_place_of(form)}, which its dtype does not hold.",
        lambda form: f"{_number(form.value)}  # in the place of {_number(form.was)}",
    ),
    Form.SCALE_FIRST: FormText(
        lambda form: f"the {_scaled(form)}, not the product after it",
        lambda form: f"Have the {_scaled(form)}, not the product after it.",
        lambda form: f"y = (a * {_number(form.value)}) @ b",
    ),
    Form.IN_FLOAT32: FormText(
        lambda form: f"{form.call} alone in float32",
        lambda form: f"Compute {form.call} in float32, outside of autocast.",
        lambda form: (
            "with torch.autocast(device_type, enabled=False):\n"
            f"    y = torch.{form.call}(x.float())  # each operand in float32"
        ),
    ),
}
