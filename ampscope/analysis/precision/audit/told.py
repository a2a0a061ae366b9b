"""What an audit says, in a sentence or two, and what to paste."""

from __future__ import annotations

from collections.abc import Sequence

from ampscope.analysis.precision.audit.layer_losses import LayerLoss
from ampscope.analysis.precision.audit.op_losses import BACKWARD_CODE, Loss, OpLoss, unit
from ampscope.analysis.words.wording import op_in_words
from ampscope.trace.schema import LOSS_CODE

#: What stands out beside what every op does.
GRAVE = (Loss.CANCELS, Loss.COARSE)
#: Layers that are no modules.
_OUTSIDE = {
    "": "The model's own forward",
    LOSS_CODE: "The code of the loss",
    BACKWARD_CODE: "Backward outside the layers",
}


def unavailable(reason: str) -> str:
    """Of an audit that could not be made."""
    return f"The step could not be audited: {reason}."


def sentence(layers: Sequence[LayerLoss], before: Sequence[str], coarsest: str, measured: int, unknown: int) -> str:
    """Which layer loses most, and how.

    Args:
        layers: Those that lost most first.
        before: Where its worst op cancels, the layers in which its operands were last rounded.
        coarsest: The coarsest dtype in the step; empty where nothing was rounded.
        measured: How many ops the audit measured, whether or not their rows are still there.
        unknown: And how many it could not.
    """
    if not layers and measured:
        return "The rows of the step's ops are missing from the run: which layer loses what is not known."
    if not layers or not coarsest:
        if unknown:
            return "Nothing that could be measured in the step is rounded to less than the reference."
        return "Nothing in the step is rounded to less than the reference: there is nothing to lose."
    first = layers[0]
    if first.kind in GRAVE and first.worst is not None:
        return f"{in_words(first)} loses most: {_how(first.worst, first.module, before)}"
    most = f"{in_words(first)} moves the loss most." if first.moves_loss else ""
    grave = next((each for each in layers if each.kind in GRAVE), None)
    if grave is None or grave.worst is None:
        return f"No layer stands out: every op rounds as {coarsest} must. {most}".strip()
    return f"{most} Less for the loss, in {_inside(grave)}: {_how(grave.worst, grave.module, ())}".strip()


def code(layers: Sequence[LayerLoss], before: Sequence[str]) -> str:
    """What keeps the layer that loses most in float32, and those whose results it takes apart."""
    if not layers or layers[0].kind not in GRAVE:
        return ""
    names = [name for name in dict.fromkeys([layers[0].module, *before]) if name not in _OUTSIDE]
    listed = ", ".join('"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"' for name in names)
    return f"ampscope.keep_fp32(model, [{listed}])" if names else ""


def in_words(layer: LayerLoss) -> str:
    """A layer at the beginning of a sentence."""
    return _OUTSIDE.get(layer.module, layer.module)


def _inside(layer: LayerLoss) -> str:
    return in_words(layer)[:1].lower() + in_words(layer)[1:] if layer.module in _OUTSIDE else layer.module


def _how(op: OpLoss, layer: str, before: Sequence[str]) -> str:
    where = f" at {op.source.file}:{op.source.line}" if op.source is not None else ""
    name = f"{op_in_words(op.op)}{where}"
    if op.kind is Loss.CANCELS:
        elsewhere = [each for each in before if each != layer]
        rounded = f", rounded in {' and '.join(elsewhere[:3])}," if elsewhere else ""
        return (
            f"the terms of {name} nearly cancel, and their error{rounded} grows from {share(op.operand_error)} "
            f"to {share(op.inherited)} of what is left."
        )
    times = (op.local or 0.0) / (unit(op.dtypes) or 1.0)
    return (
        f"{name} is off by {share(op.local)} on its own operands, {times:,.0f} times what one rounding to "
        f"{max(op.dtypes, key=lambda each: unit([each]))} takes."
    )


def share(error: float | None) -> str:
    """A relative error, as a percentage with two digits."""
    if error is None:
        return "an unknown share"
    percent = 100 * error
    return f"{percent:,.0f} %" if percent >= 10 else f"{percent:.2g} %"
