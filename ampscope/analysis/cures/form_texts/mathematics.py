"""How forms of calls are told that are not defined, or infinite, for what they were given."""

from __future__ import annotations

from ampscope.analysis.cures.form_texts.form_text import FormText, value
from ampscope.trace.schema import Form

TEXTS: dict[str, FormText] = {
    Form.OPERAND_BOUND: FormText(
        lambda form: f"the operand of {form.call} bounded by {value(form)}",
        lambda form: f"Bound the operand of {form.call} by {value(form)}, which its dtype holds.",
        lambda form: f"y = torch.{form.call}(x.clamp(min={value(form)}))",
    ),
}
