"""How each form of a call is told: what a replay did, the advice, its code, and what the line becomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf

from ampscope.analysis import words
from ampscope.analysis.cures import own_words
from ampscope.analysis.results import Cost, FormTried, Remedy, Tried
from ampscope.analysis.words import in_code, number
from ampscope.trace.schema import Change, Form, Trial


class FormText:
    """How one form is told.

    Args:
        tried: What a replay did, after ``with``.
        sentence: The advice.
        code: Its general form, where the line itself cannot be rewritten.
    """

    def __init__(
        self,
        tried: Callable[[FormTried], str],
        sentence: Callable[[FormTried], str],
        code: Callable[[FormTried], str] = lambda _: "",
    ) -> None:
        self.tried = tried
        self.sentence = sentence
        self.code = code


def was(form: FormTried) -> str:
    """The number that stood there."""
    return number(form.was or 0.0)


def coded(form: FormTried) -> str:
    """`value` as code writes it."""
    return in_code(form.value) if form.value is not None else ""


def value(form: FormTried) -> str:
    """The number that went in; empty where none did."""
    return number(form.value) if form.value is not None else ""


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


_OF_MATHEMATICS: dict[str, FormText] = {
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

_OF_OPTIMIZERS: dict[str, FormText] = {
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


def _number(value: float | None) -> str:
    """Returns a number as code writes it: a bound next to 1 is not written as 1."""
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


_OF_RANGE: dict[str, FormText] = {
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


#: The replays of one form, with one loss scale.
_Group = list[tuple[FormTried, Tried]]
#: Units of a dtype's eps up to which another value is the same one, rounded elsewhere.
ROUNDING = 4.0


def remedies(tried: Sequence[Tried]) -> Iterator[Remedy]:
    """The forms that were tried, as advice: what cured every step on which it was tried, and what did not help."""
    by_words: dict[str, _Group] = {}
    for each in tried:
        if each.change == Change.FORM and each.form is not None and each.outcome != Trial.UNAVAILABLE:
            by_words.setdefault(in_words(each.form) + with_scale(each, tried), []).append((each.form, each))
    for found in _each_once(by_words.values(), tried):
        form, first = found[0]
        cures = all(each.outcome == Trial.FINITE for _, each in found)
        scale = with_scale(first, tried)
        start = f"scaler = torch.amp.GradScaler(init_scale={first.scale!r})" if scale else ""
        parts = [each for each in (form.beside, form) if each is not None]
        alone = " The first alone only moves the failure to the second." if form.beside is not None else ""
        yield Remedy(
            text=f"{' '.join(map(_sentence, parts)).removesuffix('.')}{scale}.{alone}",
            code="\n".join(filter(None, (*(_text(each).code(each) for each in parts), start))),
            verified=cures,
            kind=form.form,
            cost=cost([each for _, each in found]),
            diff=own_words.of_forms(parts) if cures else None,  # a scaler comes down to a scale by itself
            changes_good_values=_changes_good_values([*parts, *(form for form, _ in found)]),
        )


def _each_once(groups: Iterable[_Group], tried: Sequence[Tried]) -> list[_Group]:
    """Keeps, of a form that cures with several loss scales, the largest scale alone: a scaler finds smaller ones."""
    cures: dict[str, list[_Group]] = {}
    told: list[_Group] = []
    for found in groups:
        told.append(found)
        if all(each.outcome == Trial.FINITE for _, each in found):
            cures.setdefault(in_words(found[0][0]), []).append(found)
    best = [max(alike, key=lambda found: _scale(found, tried)) for alike in cures.values()]
    return [found for found in told if found in best or any(each.outcome != Trial.FINITE for _, each in found)]


def _scale(found: _Group, tried: Sequence[Tried]) -> float:
    """The loss scale that a form was tried with; infinite where it needs no other than the step's."""
    first = found[0][1]
    return (first.scale or 0.0) if with_scale(first, tried) else inf


def with_scale(form: Tried, tried: Sequence[Tried]) -> str:
    """The loss scale that a form was tried with, with ``and`` before it; empty for that of the step."""
    others = [each.scale for each in tried if each.step == form.step and each.change not in (Change.FORM, Change.SCALE)]
    other = form.scale is not None and bool(others) and form.scale not in others
    return f", and a loss scale of {words.in_words(form.scale or 0.0)}" if other else ""


def in_words(form: FormTried) -> str:
    """States what a replay did, to come after ``with``: ``the operand of log bounded from below by 6.104e-05``."""
    beside = f"{_text(form.beside).tried(form.beside)} and " if form.beside is not None else ""
    return beside + _text(form).tried(form)


def are_of_optimizer(tried: Sequence[Tried]) -> bool:
    """Whether the optimizer's step alone was run again."""
    return bool(tried) and all(each.form is not None and each.form.form in _OF_OPTIMIZERS for each in tried)


def is_of_growth(tried: Tried) -> bool:
    """Whether it was tried on a step whose loss had just grown."""
    return tried.form is not None and tried.form.form in OF_GROWTH


def cost(tried: Sequence[Tried]) -> Cost | None:
    """Returns the cost of one change, by the first of its replays that measured it; None where none did."""
    time = next((each.extra_time for each in tried if each.extra_time is not None), None)
    memory = next((each.extra_bytes for each in tried if each.extra_bytes is not None), None)
    return Cost(time=time, bytes=memory) if time is not None or memory is not None else None


def _changes_good_values(forms: Sequence[FormTried]) -> bool | None:
    """Whether values that were good are others; None where it was not measured, or is so on other steps only."""
    known = [form.good_change for form in forms if form.good_change is not None]
    changes = max(known) > ROUNDING if known else None
    depends = any(form.form == Form.MAX_OFF and form.was is not None for form in forms)
    return None if depends and not changes else changes


# -- in words ---------------------------------------------------------------------------------------------------------

_UNKNOWN = FormText(
    lambda form: f"another form of {form.call or 'a call'}",
    lambda form: f"Give {form.call or 'the call'} another form.",
)
_TEXTS: dict[str, FormText] = {**_OF_MATHEMATICS, **_OF_RANGE, **_OF_OPTIMIZERS}


def _sentence(form: FormTried) -> str:
    return _text(form).sentence(form)


def _text(form: FormTried) -> FormText:
    """How a form is told; one that a later version has recorded, in general words."""
    return _TEXTS.get(form.form, _UNKNOWN)
