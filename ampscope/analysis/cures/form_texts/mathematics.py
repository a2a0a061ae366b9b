"""How forms of calls are told that are not defined, or infinite, for what they were given."""

from __future__ import annotations

from ampscope.analysis.cures.form_texts.form_text import FormText, coded, value
from ampscope.analysis.results import FormTried
from ampscope.analysis.words.number_words import number
from ampscope.trace.schema import Form

#: Calls whose operand is bounded from above; that of all others is from below.
_FROM_ABOVE = frozenset({"exp", "exp2", "expm1"})
#: Means that divide by how many there are.
_MEANS = frozenset({"mean", "cross_entropy", "nll_loss"})
_DEVIATIONS = frozenset({"std", "var", "std_mean", "var_mean"})
#: Calls whose operand is kept from 1 and from -1.
_BETWEEN = frozenset({"acos", "asin", "atanh", "erfinv", "arccos", "arcsin", "arctanh", "special_erfinv"})
_DIVISIONS = frozenset({"div", "true_divide"})
_ATTENTION = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})


def _is_mean(form: FormTried) -> bool:
    return form.call in _MEANS | _DEVIATIONS or form.call.endswith("_loss") or form.call == "binary_cross_entropy"


def _bounded(form: FormTried) -> str:
    if _is_mean(form):
        return f"the number that {form.call} divides by at least {value(form)}"
    if form.call in _BETWEEN:
        return f"the operand of {form.call} kept between -{value(form)} and {value(form)}"
    side = "above" if form.call in _FROM_ABOVE else "below"
    what = "the divisor" if form.call in _DIVISIONS else f"the operand of {form.call}"
    return f"{what} bounded from {side} by {value(form)}"


def _bound(form: FormTried) -> str:
    if form.call in _DEVIATIONS:
        return f"Divide by at least {value(form)} where {form.call} is given a single value: it is zero then."
    if form.call in _BETWEEN:
        return f"Keep the operand of {form.call} between -{value(form)} and {value(form)}: there its slope is finite."
    if _is_mean(form):
        return f"Divide by at least {value(form)} where {form.call} has nothing to average: it is zero then."
    side = "above" if form.call in _FROM_ABOVE else "below"
    what = "divisor" if form.call in _DIVISIONS else f"operand of {form.call}"
    return f"Bound the {what} from {side} by {value(form)}."


def _bound_code(form: FormTried) -> str:
    if form.call in _DEVIATIONS:
        return f"y = x.{form.call}(0, correction=min(1, x.shape[0] - 1))"
    if form.call in _BETWEEN:
        return f"y = torch.{form.call}(x.clamp(-{value(form)}, {value(form)}))"
    if _is_mean(form):
        return "loss = total / max(1, count)  # total: the sum, count: of how many"
    if form.call in _DIVISIONS:
        return f"y = a / b.clamp(min={coded(form)})"
    end = "max" if form.call in _FROM_ABOVE else "min"
    return f"y = torch.{form.call}(x.clamp({end}={coded(form)}){', p' if form.call == 'pow' else ''})"


def _added(form: FormTried) -> str:
    return f"{value(form)} added to {'the divisor' if form.call in _DIVISIONS else f'the operand of {form.call}'}"


def _add(form: FormTried) -> str:
    return f"Add {value(form)} to the {'divisor' if form.call in _DIVISIONS else f'operand of {form.call}'}."


def _added_code(form: FormTried) -> str:
    if form.call in _DIVISIONS:
        return f"y = a / (b + {coded(form)})"
    return f"y = torch.{form.call}(x + {coded(form)}{', p' if form.call == 'pow' else ''})"


def _has_value(form: FormTried) -> bool:
    """Whether the op has a value where its operand is made safe: a root of zero is zero."""
    return form.call in ("sqrt", "pow")


def _where(form: FormTried) -> str:
    return "0" if form.call in (*_DIVISIONS, "reciprocal") else "not positive"


def _safe(form: FormTried) -> str:
    if _has_value(form):
        return f"no gradient through {form.call} where its operand is {_where(form)}"
    what = "the divisor" if form.call in _DIVISIONS else f"the operand of {form.call}"
    return f"{what} replaced by 1 where it is {_where(form)}"


def _make_safe(form: FormTried) -> str:
    if _has_value(form):
        return f"Let no gradient through {form.call} where its operand is {_where(form)}: its slope is infinite there."
    what = "divisor" if form.call in _DIVISIONS else f"operand of {form.call}"
    return f"Replace the {what} by 1 where it is {_where(form)}, before the op; a torch.where after it is too late."


def _safe_code(form: FormTried) -> str:
    if form.call in _DIVISIONS:
        return "y = a / torch.where(b == 0, 1.0, b)"
    condition = "x == 0" if form.call == "reciprocal" else "x <= 0"
    power = ", p" if form.call == "pow" else ""
    if _has_value(form):
        return f"bad = {condition}\ny = torch.where(bad, 0.0, torch.{form.call}(torch.where(bad, 1.0, x){power}))"
    return f"y = torch.{form.call}(torch.where({condition}, 1.0, x){power})"


def _kept(form: FormTried) -> str:
    return f"zero for what {form.call} gives of rows without a key"


def _keep(form: FormTried) -> str:
    if form.call in _ATTENTION:
        return "Do not mask rows that have no key left, and set what attention gives for them to zero."
    return f"Do not mask rows that have no key left, and set what {form.call} gives for them to zero."


def _kept_code(form: FormTried) -> str:
    if form.call in _ATTENTION:
        return (
            "empty = ~mask.any(-1, keepdim=True)  # mask: True where a key takes part\n"
            "y = F.scaled_dot_product_attention(q, k, v, mask | empty).masked_fill(empty, 0.0)"
        )
    return (
        "empty = (x == -torch.inf).all(-1, keepdim=True)\n"
        f"y = x.masked_fill(empty, 0.0).{form.call}(-1).masked_fill(empty, 0.0)"
    )


def _take_off(form: FormTried) -> str:
    if form.was is None:
        return f"Subtract the maximum from the operand of {form.call}: divided by their sum, the results are the same."
    return (
        f"Subtract the maximum from the operand of {form.call}. Divided by their sum, the results are the same, except "
        f"where the {number(form.was)} added to a small sum made them smaller."
    )


TEXTS: dict[str, FormText] = {
    Form.OPERAND_BOUND: FormText(_bounded, _bound, _bound_code),
    Form.ADDED_EPS: FormText(_added, _add, _added_code),
    Form.SAFE_WHERE: FormText(_safe, _make_safe, _safe_code),
    Form.LOG_SOFTMAX: FormText(
        lambda form: f"log_softmax of the logits instead of {form.call} of their softmax",
        lambda form: f"Use log_softmax of the logits instead of {form.call} of their softmax.",
        lambda _: "log_p = F.log_softmax(logits, dim=-1)  # or F.cross_entropy(logits, target)",
    ),
    Form.LOGSIGMOID: FormText(
        lambda form: f"logsigmoid of the logits instead of {form.call} of their sigmoid",
        lambda form: f"Use logsigmoid of the logits instead of {form.call} of their sigmoid.",
        lambda _: "log_p, log_q = F.logsigmoid(logits), F.logsigmoid(-logits)  # q = 1 - p",
    ),
    Form.WITH_LOGITS: FormText(
        lambda form: f"binary_cross_entropy_with_logits instead of {form.call} of a sigmoid",
        lambda form: f"Use binary_cross_entropy_with_logits of the logits instead of {form.call} of their sigmoid.",
        lambda _: "loss = F.binary_cross_entropy_with_logits(logits, target)",
    ),
    Form.CROSS_ENTROPY: FormText(
        lambda form: f"cross_entropy of the logits instead of {form.call} of the logarithm of their softmax",
        lambda form: f"Use cross_entropy of the logits instead of {form.call} of the logarithm of their softmax.",
        lambda _: "loss = F.cross_entropy(logits, target)",
    ),
    Form.CENTRED: FormText(
        lambda _: "the variance from centred values",
        lambda _: (
            "Compute the variance from centred values: the mean of squares minus the squared mean cancels, and "
            "overflows sooner."
        ),
        lambda _: "var = (x - x.mean(-1, keepdim=True)).square().mean(-1)",
    ),
    Form.LOGSUMEXP: FormText(
        lambda form: f"logsumexp instead of {form.call} of a sum of exponentials",
        lambda form: f"Use logsumexp instead of {form.call} of a sum of exponentials.",
        lambda _: "y = torch.logsumexp(x, dim=-1)",
    ),
    Form.MAX_OFF: FormText(
        lambda form: f"the maximum subtracted from the operand of {form.call}",
        _take_off,
        lambda form: f"e = torch.{form.call}(x - x.amax(-1, keepdim=True))  # or the whole as x.softmax(-1)",
    ),
    Form.KEPT_ROWS: FormText(_kept, _keep, _kept_code),
    Form.ZERO_INFINITY: FormText(
        lambda _: "a loss of zero for CTC targets without an alignment",
        lambda _: "Set the loss of targets without an alignment to zero.",
        lambda _: "loss = torch.nn.CTCLoss(zero_infinity=True)(log_probs, targets, input_lengths, target_lengths)",
    ),
    Form.ROWS_LEFT_OUT: FormText(
        lambda _: "the rows of the batch left out that are not finite",
        lambda _: "Leave the rows of the batch out that are not finite.",
        lambda _: "good = x.flatten(1).isfinite().all(1)\nx, y = x[good], y[good]",
    ),
}
