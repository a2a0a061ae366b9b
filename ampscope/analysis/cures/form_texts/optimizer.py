"""How other steps of an optimizer are told."""

from __future__ import annotations

from ampscope.analysis.cures.form_texts.form_text import FormText, coded, value, was
from ampscope.analysis.results import FormTried
from ampscope.trace.schema import Form

#: Tried on a step whose loss had just grown, before the one that went bad.
OF_GROWTH = frozenset({Form.SMALLER_STEP, Form.CLIPPED})


def _give_eps(form: FormTried) -> str:
    if not form.was:
        return f"Give {form.call} an eps of {value(form)}: without one it divides by zero."
    return f"Give {form.call} an eps of {value(form)}: {was(form)} is zero in the dtype of its parameters."


_CLIPPED = FormText(
    lambda form: f"the gradients' norm clipped to {value(form)}",
    lambda form: f"Clip the gradients' norm to {value(form)}, after unscaling.",
    lambda form: f"torch.nn.utils.clip_grad_norm_(model.parameters(), {form.value!r})",
)

TEXTS: dict[str, FormText] = {
    Form.OPTIMIZER_EPS: FormText(
        lambda form: f"an eps of {value(form)} in {form.call}",
        _give_eps,
        lambda form: f"optimizer = {form.call}(model.parameters(), eps={coded(form)})  # the rest as it is",
    ),
    Form.OPTIMIZER_IN_FLOAT32: FormText(
        lambda form: f"float32 weights, gradients and state in {form.call}",
        lambda form: f"Keep the weights in float32: then the gradients and the state of {form.call} are float32, too.",
        lambda _: "model.float()  # before the optimizer is made; autocast computes in half precision",
    ),
    Form.OPTIMIZER_CLIPPED: _CLIPPED,
    Form.SMALLER_STEP: FormText(
        lambda form: f"a learning rate of {value(form)} instead of {was(form)}",
        lambda form: (
            f"Lower the learning rate, or warm it up: at {value(form)} instead of {was(form)}, a step at which the "
            "loss had grown lowers it on its own batch."
        ),
        lambda form: f"optimizer = {form.call}(model.parameters(), lr={coded(form)})  # the rest as it is",
    ),
    Form.CLIPPED: _CLIPPED,
}
