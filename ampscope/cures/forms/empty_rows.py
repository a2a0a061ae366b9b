"""Rows without a key, and targets without an alignment, are left out."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Iterator, Sequence

from ampscope.cures.call_form import Call, CallForm, ComparedValues
from ampscope.cures.cure_form import CureForm, TrialTurn
from ampscope.cures.failed_op import FailedOp
from ampscope.cures.rewriting.found_call import Asked, as_call, found_call
from ampscope.cures.rewriting.literals import added_keyword, value_of
from ampscope.cures.rewriting.program import first_settings
from ampscope.cures.rewriting.statement import Splice, Statement, can_repeat, dotted, is_plain
from ampscope.trace.schema import Form

_SOFTMAXES = frozenset({"softmax", "log_softmax"})
_ATTENTION = "scaled_dot_product_attention"
_HEADS = "multi_head_attention_forward"
_ATTENTIONS = frozenset({_ATTENTION, _HEADS})
#: Where ``zero_infinity`` stands among the arguments of a CTC loss.
_ZERO_INFINITY = 6


class KeptRows(CallForm):
    """A softmax, or an attention, whose rows without a single key are zero."""

    form = Form.KEPT_ROWS
    live_as = "kept_rows"
    told = "rows without a key zero"

    def __init__(self, calls: frozenset[str] = _SOFTMAXES | _ATTENTIONS) -> None:
        super().__init__(calls)

    def instead(self, call: Call) -> object:
        """See `CallForm.instead`."""
        if call.name in _SOFTMAXES:
            return _softmax(call)
        return _attention(call) if call.name == _ATTENTION else _heads(call)

    def compared(self, call: Call, result: object) -> Iterable[ComparedValues]:
        """See `CallForm.compared`: of what attention returns, its output."""
        first = result[0] if isinstance(result, tuple) else result
        before = call()
        return (ComparedValues(before[0] if isinstance(before, tuple) else before, first),)


def _softmax(call: Call) -> object:
    """Makes rows of nothing but -inf zero: before the softmax, and after it."""
    given, dim = call.tensor(), call.argument(1, "dim")
    if given is None or not isinstance(dim, int):
        return NotImplemented
    empty = (given == -math.inf).all(dim, keepdim=True)
    return call.with_operand(0, given.masked_fill(empty, 0.0))().masked_fill(empty, 0.0)


def _attention(call: Call) -> object:
    """Makes rows zero that the mask leaves without a key (False or -inf), in ``scaled_dot_product_attention``."""
    import torch

    mask = call.argument(3, "attn_mask")
    if not isinstance(mask, torch.Tensor):
        return NotImplemented
    empty = (~mask if mask.dtype is torch.bool else mask == -math.inf).all(-1, keepdim=True)
    kept = mask | empty if mask.dtype is torch.bool else mask.masked_fill(empty, 0.0)
    kwargs = {name: value for name, value in call.kwargs.items() if name != "attn_mask"}
    args = (*call.args[:3], kept, *call.args[4:])
    return call._replace(args=args, kwargs=kwargs)().masked_fill(empty, 0.0)


def _heads(call: Call) -> object:
    """Makes batches zero all of whose keys are padding, in ``nn.MultiheadAttention``."""
    import torch

    padding = call.kwargs.get("key_padding_mask")
    if not isinstance(padding, torch.Tensor) or padding.dim() != 2:
        return NotImplemented
    empty = (padding if padding.dtype is torch.bool else padding == -math.inf).all(-1)
    kept = padding.masked_fill(empty[:, None], False if padding.dtype is torch.bool else 0.0)
    output, *others = call._replace(kwargs={**call.kwargs, "key_padding_mask": kept})()
    return (output.masked_fill(empty[None, :, None], 0.0), *others)


class ZeroInfinity(CallForm):
    """A CTC loss that is zero where there is no alignment."""

    form = Form.ZERO_INFINITY
    live_as = "zero_infinity"
    told = "targets without an alignment left out"

    def __init__(self, calls: frozenset[str] = frozenset({"ctc_loss"})) -> None:
        super().__init__(calls)

    def instead(self, call: Call) -> object:
        """See `CallForm.instead`."""
        kwargs = {**call.kwargs, "zero_infinity": True}
        return call._replace(args=call.args[:_ZERO_INFINITY], kwargs=kwargs)()


def of_softmax(failed: FailedOp) -> Iterator[CallForm]:
    """Rows that a mask leaves without a key, zero."""
    attention = "softmax" in failed.name or "scaled_dot_product" in failed.name
    ends = [failed.operand(number) for number in range(len(failed.site.in_dtypes))] if attention else []
    if any(each is not None and each.low == -math.inf for each in ends):
        yield KeptRows()


def of_ctc(failed: FailedOp) -> Iterator[CallForm]:
    """Targets without an alignment left out of the loss."""
    if "ctc_loss" in failed.name:
        yield ZeroInfinity()


# -- in the user's statement -------------------------------------------------------------------------------------------


def _write_kept(statement: Statement, _: Asked) -> Sequence[Splice]:
    """``masked_fill(m, -inf).softmax(-1)``: rows without a key are left out of the mask, and zero in the end."""
    softmax = found_call(statement, "softmax")
    over = softmax.argument(1, "dim") if softmax is not None else None
    dim = statement.text(over) if over is not None else ""
    scores = softmax.operand(0) if softmax is not None else None
    if softmax is None or scores is None or not dim or not isinstance(softmax.node, ast.expr):
        return ()
    end = statement.span(softmax.node)[1]
    fill = as_call(scores, "masked_fill")
    if fill is None:
        if not is_plain(scores) or not dotted(scores):
            return ()
        text = statement.text(scores)
        infinity, finfo = statement.spelled("torch.inf"), statement.spelled("torch.finfo")
        zero = f".masked_fill(({text} == -{infinity}).all({dim}, keepdim=True), 0.0)"
        lowest = f"{text}.clamp(min={finfo}({text}.dtype).min)"  # a row of nothing else becomes an even one
        return [statement.instead(scores, lowest), Splice(end, end, zero)]
    mask, value = fill.operand(1), fill.argument(2, "value")
    if mask is None or value is None or value_of(value) != -math.inf or not can_repeat(mask):
        return ()
    atom = statement.atom(mask)
    empty = f"{atom}.all({dim}, keepdim=True)"
    return [statement.instead(mask, f"{atom} & ~{empty}"), Splice(end, end, f".masked_fill({empty}, 0.0)")]


def _write_zero(statement: Statement, _: Asked) -> Sequence[Splice]:
    """``ctc_loss(...)`` becomes ``ctc_loss(..., zero_infinity=True)``."""
    found = found_call(statement, "ctc_loss") or found_call(statement, "CTCLoss")
    if found is None or not isinstance(found.node, ast.Call):
        return ()
    given = found.keywords.get("zero_infinity")
    if given is None:
        return [added_keyword(statement, found.node, "zero_infinity=True")] if not found.is_method else ()
    off = isinstance(given.value, ast.Constant) and given.value.value is False
    return [statement.instead(given.value, "True")] if off else ()


def _rows(asked: Asked) -> str:
    return "attention" if asked.call in _ATTENTIONS else asked.call


def _kept_code(asked: Asked) -> str:
    if asked.call in _ATTENTIONS:
        return (
            "empty = ~mask.any(-1, keepdim=True)  # mask: True where a key takes part\n"
            "y = F.scaled_dot_product_attention(q, k, v, mask | empty).masked_fill(empty, 0.0)"
        )
    return (
        "empty = (x == -torch.inf).all(-1, keepdim=True)\n"
        f"y = x.masked_fill(empty, 0.0).{asked.call}(-1).masked_fill(empty, 0.0)"
    )


FORMS = (
    CureForm(
        form=Form.KEPT_ROWS,
        tried=lambda asked: f"zero for what {asked.call} gives of rows without a key",
        sentence=lambda asked: (
            f"Do not mask rows that have no key left, and set what {_rows(asked)} gives for them to zero."
        ),
        code=_kept_code,
        turn=TrialTurn.SAFE,
        rules=(of_softmax,),
        live=(KeptRows,),
        rewriting=_write_kept,
    ),
    CureForm(
        form=Form.ZERO_INFINITY,
        tried=lambda _: "a loss of zero for CTC targets without an alignment",
        sentence=lambda _: "Set the loss of targets without an alignment to zero.",
        code=lambda _: "loss = torch.nn.CTCLoss(zero_infinity=True)(log_probs, targets, input_lengths, target_lengths)",
        turn=TrialTurn.SAFE,
        rules=(of_ctc,),
        live=(ZeroInfinity,),
        rewriting=_write_zero,
        elsewhere=lambda place, _: first_settings.with_zero_infinity(place),
    ),
)
