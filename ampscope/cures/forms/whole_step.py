"""Forms of a whole step: its batch, its gradients, its optimizer. They are told here; capture knows how to try them."""

from __future__ import annotations

from ampscope.cures.cure_form import CureForm, coded, value, was
from ampscope.cures.rewriting.found_call import Asked
from ampscope.trace.schema import Form

#: Tried on a step whose loss had just grown, before the one that went bad.
OF_GROWTH = frozenset({Form.SMALLER_STEP, Form.CLIPPED})
#: Tried on the optimizer's step alone.
OF_OPTIMIZERS = OF_GROWTH | {Form.OPTIMIZER_EPS, Form.OPTIMIZER_IN_FLOAT32, Form.OPTIMIZER_CLIPPED}


def _give_eps(asked: Asked) -> str:
    if not asked.was:
        return f"Give {asked.call} an eps of {value(asked)}: without one it divides by zero."
    return f"Give {asked.call} an eps of {value(asked)}: {was(asked)} is zero in the dtype of its parameters."


def _clipped(form: Form) -> CureForm:
    return CureForm(
        form=form,
        tried=lambda asked: f"the gradients' norm clipped to {value(asked)}",
        sentence=lambda asked: f"Clip the gradients' norm to {value(asked)}, after unscaling.",
        code=lambda asked: f"torch.nn.utils.clip_grad_norm_(model.parameters(), {asked.value!r})",
    )


FORMS = (
    CureForm(
        form=Form.ROWS_LEFT_OUT,
        tried=lambda _: "the rows of the batch left out that are not finite",
        sentence=lambda _: "Leave the rows of the batch out that are not finite.",
        code=lambda _: "good = x.flatten(1).isfinite().all(1)\nx, y = x[good], y[good]",
    ),
    CureForm(
        form=Form.OPTIMIZER_EPS,
        tried=lambda asked: f"an eps of {value(asked)} in {asked.call}",
        sentence=_give_eps,
        code=lambda asked: f"optimizer = {asked.call}(model.parameters(), eps={coded(asked)})  # the rest as it is",
        speaks_for=frozenset({Form.OPTIMIZER_EPS, Form.CONSTANT, Form.OPERAND_BOUND}),
    ),
    CureForm(
        form=Form.OPTIMIZER_IN_FLOAT32,
        tried=lambda asked: f"float32 weights, gradients and state in {asked.call}",
        sentence=lambda asked: (
            f"Keep the weights in float32: then the gradients and the state of {asked.call} are float32, too."
        ),
        code=lambda _: "model.float()  # before the optimizer is made; autocast computes in half precision",
    ),
    _clipped(Form.OPTIMIZER_CLIPPED),
    CureForm(
        form=Form.SMALLER_STEP,
        tried=lambda asked: f"a learning rate of {value(asked)} instead of {was(asked)}",
        sentence=lambda asked: (
            f"Lower the learning rate, or warm it up: at {value(asked)} instead of {was(asked)}, a step at which the "
            "loss had grown lowers it on its own batch."
        ),
        code=lambda asked: f"optimizer = {asked.call}(model.parameters(), lr={coded(asked)})  # the rest as it is",
    ),
    _clipped(Form.CLIPPED),
)
