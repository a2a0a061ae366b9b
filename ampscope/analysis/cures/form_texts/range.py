"""How forms of calls are told that are well in float32, and not in the range or the precision of a half dtype."""

from __future__ import annotations

from ampscope.analysis.cures.form_texts.form_text import FormText, value, was
from ampscope.analysis.results import FormTried
from ampscope.trace.schema import Form


def _number(value: float | None) -> str:
    """As code writes it: a bound next to 1 is not 1."""
    return f"{value:.12g}" if value is not None else ""


def _instead(form: FormTried) -> str:
    return f"{value(form)} instead of {was(form)}"


#: What functions are given, as float32; all others take one tensor.
_GIVEN = {
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot", "inner", "outer"), "a.float(), b.float()"),
    **dict.fromkeys(("mul", "add", "sub", "div", "true_divide"), "a.float(), b.float()"),
    **dict.fromkeys(("addmm", "addbmm", "baddbmm", "addmv", "addr"), "c.float(), a.float(), b.float()"),
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d"), "x.float(), weight.float(), bias.float()"),
    **dict.fromkeys((f"conv_transpose{n}d" for n in "123"), "x.float(), weight.float(), bias.float()"),
    "bilinear": "a.float(), b.float(), weight.float(), bias.float()",
    "einsum": "equation, a.float(), b.float()",
    "scaled_dot_product_attention": "q.float(), k.float(), v.float()",
    "cross_entropy": "x.float(), target",
    "binary_cross_entropy": "x.float(), target.float()",
    "binary_cross_entropy_with_logits": "x.float(), target.float()",
}
#: What stands in `torch.nn.functional` alone, besides the losses.
_FUNCTIONAL = frozenset(
    {"linear", "bilinear", "normalize", "gelu", "cross_entropy", "scaled_dot_product_attention"}
    | {"binary_cross_entropy", "binary_cross_entropy_with_logits"}
)


def _in_float32(call: str) -> str:
    """A call on float32 operands: ``torch.matmul(a.float(), b.float())``."""
    is_loss = call.endswith("_loss")
    given = "x.float(), target" if is_loss else _GIVEN.get(call, "x.float()")
    rest = "" if is_loss or call in _GIVEN else "  # its other arguments as they are"
    return f"{'F' if is_loss or call in _FUNCTIONAL else 'torch'}.{call}({given}){rest}"


TEXTS: dict[str, FormText] = {
    Form.CONSTANT: FormText(
        lambda form: f"{_instead(form)} in {form.call}",
        lambda form: f"Give {form.call} {_instead(form)}, which its dtype does not hold.",
        lambda form: f"{_number(form.value)}  # instead of {_number(form.was)}",
    ),
    Form.SCALE_FIRST: FormText(
        lambda form: f"the first factor of {form.call} multiplied by {_number(form.value)}, not the product",
        lambda form: f"Multiply the first factor of {form.call} by {_number(form.value)}, not the product.",
        lambda form: f"y = (a * {_number(form.value)}) @ b",
    ),
    Form.IN_FLOAT32: FormText(
        lambda form: f"{form.call} alone in float32",
        lambda form: f"Compute {form.call} in float32, outside of autocast.",
        lambda form: f"with torch.autocast(device_type, enabled=False):\n    y = {_in_float32(form.call)}",
    ),
}
