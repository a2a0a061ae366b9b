"""General advice as diffs, where the lines that it is about are known: what none of the replays has tried."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from math import ceil, copysign, log10

from ampscope.analysis import rounding
from ampscope.analysis.causes.cause_entry import Reason
from ampscope.analysis.causes.outside import CameIn
from ampscope.analysis.causes.overflow import Literal, Overflowed
from ampscope.analysis.causes.underflow import ConstantLost
from ampscope.analysis.causes.unknown import InfiniteConstant
from ampscope.analysis.cures import own_words
from ampscope.analysis.cures.own_words import Program
from ampscope.analysis.results import FormTried, Incident, Remedy
from ampscope.cures.rewriting.edit import joined
from ampscope.cures.rewriting.found_call import found_calls
from ampscope.cures.rewriting.names import is_number
from ampscope.cures.rewriting.program import first_settings, half
from ampscope.cures.rewriting.program.own_names import function_around, own_nodes
from ampscope.cures.rewriting.source_file import FoundStatement, HasPlace, statement_at
from ampscope.cures.rewriting.statement import dotted, statement
from ampscope.trace.dtypes import FINFO
from ampscope.trace.schema import Change, Form, Phase, Trigger
from ampscope.trace.vocabulary import Cause

#: What attributes and arguments are called that hold the scale of a product.
_SCALES = ("scale", "scaling", "temperature")


def is_scaled_before(place: HasPlace) -> bool:
    """Whether a factor of the product on a line is multiplied with a number, or divided by one, before the product.

    Args:
        place: The line, as it was recorded.
    """
    found = statement_at(place)
    parsed = statement(
        found.code if found is not None else place.code, scope=found.scope if found is not None else None
    )
    products = found_calls(parsed, "matmul") if parsed is not None else []
    factors = [factor for each in products for number in (0, 1) if (factor := each.operand(number)) is not None]
    return any(_is_scaled(each) or (found is not None and _was_scaled(found, each)) for each in factors)


def _is_scaled(node: ast.AST) -> bool:
    if not isinstance(node, (ast.BinOp, ast.AugAssign)) or not isinstance(node.op, (ast.Mult, ast.Div)):
        return False
    sides = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
    return any(is_number(side) or dotted(side).rpartition(".")[2].endswith(_SCALES) for side in sides)


def _was_scaled(found: FoundStatement, factor: ast.expr) -> bool:
    """Whether a name got a scaled value in its function, above the line."""
    tree, name = found.source.tree(), _tensor(factor)
    if tree is None or not name:
        return False
    above = [node for node in own_nodes(function_around(tree, found.first)) if getattr(node, "lineno", 0) < found.first]
    for node in above:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if name in [dotted(each) for each in targets if each is not None]:
            value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else node
            if value is not None and _is_scaled(value):
                return True
    return False


def _tensor(factor: ast.expr) -> str:
    """The name of what a factor is a view of: ``k`` of ``k.transpose(-2, -1)``."""
    while isinstance(factor, (ast.Call, ast.Attribute)):
        factor = factor.func if isinstance(factor, ast.Call) else factor.value
    return dotted(factor)


#: What an infinity of the code becomes: float16 holds it, and a softmax makes zero of its negative.
_LARGE = 1e4
_LOGARITHMS = ("log", "log2", "log10")
_OF_WEIGHTS = (Cause.HALF_PARAMS, Cause.BF16_PRECISION)
_KEPT_BY_OP = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm")


def with_diffs(remedies: Sequence[Remedy], incident: Incident, reason: Reason, program: Program) -> tuple[Remedy, ...]:
    """Remedies, with a diff for those that have none and whose lines are known, without those that the code follows.

    Args:
        remedies: All that is advised, in order.
        incident: What it is advised against.
        reason: What was seen.
        program: Lines of the program around the model.
    """
    return tuple(
        each
        if each.diff is not None or each.verified is False
        else replace(each, diff=_diff(each, incident, reason, program))
        for each in remedies
        if not _is_followed(each, incident)
    )


def _is_followed(remedy: Remedy, incident: Incident) -> bool:
    """Whether the code does already what nobody has tried on it."""
    is_advice = remedy.verified is None and remedy.kind == Form.SCALE_FIRST
    return is_advice and incident.source is not None and is_scaled_before(incident.source)


def _diff(remedy: Remedy, incident: Incident, reason: Reason, program: Program) -> str | None:
    if remedy.kind in (Change.FP32, Form.OPTIMIZER_IN_FLOAT32):
        return _of_state(remedy, incident, program)
    if remedy.kind == Form.CONSTANT and isinstance(reason, ConstantLost):
        return _of_constant(incident, reason)
    if remedy.kind == Form.OPTIMIZER_EPS:
        return _of_eps(remedy, incident)
    if remedy.kind == Form.SMALLER_STEP and remedy.verified:
        return _of_rate(incident, program)
    if remedy.kind == Form.ROWS_LEFT_OUT and remedy.verified and isinstance(reason, CameIn):
        return own_words.of_rows(program, reason.name)
    return _untried(remedy, incident, reason, program) if remedy.untried else None


def _untried(remedy: Remedy, incident: Incident, reason: Reason, program: Program) -> str | None:
    """Returns the diff of a remedy that no replay has tried, at the failed call or around the model."""
    if remedy.kind == Change.BF16:
        return own_words.of_autocast(program, "bfloat16")
    if remedy.kind == Change.MODULES_FP32 and incident.module:
        return own_words.of_kept([incident.module], program)
    if remedy.kind == Form.CONSTANT and isinstance(reason, (Literal, InfiniteConstant)):
        return _of_literal(incident, reason)
    if remedy.kind == Form.IN_FLOAT32 and incident.phase == Phase.FORWARD:
        lines = [incident.source, *(reason.likewise if isinstance(reason, Overflowed) else ())]
        calls = [FormTried(form=Form.IN_FLOAT32, call=_function(incident), source=line, argument=0) for line in lines]
        return joined([own_words.of_form(call) for call in calls])
    if remedy.kind == Form.OPERAND_BOUND and incident.cause is Cause.LOG_ZERO:
        return _of_logarithm(incident)
    return _of_slope(remedy, incident) if remedy.kind in (Form.OPERAND_BOUND, Form.ADDED_EPS) else None


def _of_slope(remedy: Remedy, incident: Incident) -> str | None:
    """An eps, or a bound, in the call whose slope was made safe: its line is known from the replay of that."""
    safe = [each.form for each in incident.tried if each.form is not None and each.form.form == Form.SAFE_WHERE]
    calls = {(form.call, form.source, form.argument) for form in safe if form.call in ("sqrt", "pow")}
    dtype = incident.inputs[0].dtype if incident.inputs else ""
    if len(calls) != 1 or not dtype:
        return None
    ((call, source, argument),) = calls
    value = max(1e-6, _round_eps(dtype))
    return own_words.of_form(FormTried(form=remedy.kind, call=call, source=source, argument=argument, value=value))


def _of_literal(incident: Incident, reason: Literal | InfiniteConstant) -> str | None:
    """The end of the dtype's range in the place of a number that is beyond it; a finite number in that of infinity."""
    known = FINFO.get(reason.dtype) if isinstance(reason, Literal) else None
    most = _LARGE if isinstance(reason, InfiniteConstant) else known.max if known is not None else 0.0
    if not most or reason.value is None:
        return None
    call, end = _function(incident), copysign(most, reason.value)
    tried = FormTried(form=Form.CONSTANT, call=call, source=incident.source, value=end, was=reason.value)
    return own_words.of_form(tried)


def _of_rate(incident: Incident, program: Program) -> str | None:
    """The learning rate that lowered the loss, where the optimizer is made: in the file of the loop, or of `watch`."""
    forms = [each.form for each in incident.tried if each.form is not None and each.form.form == Form.SMALLER_STEP]
    places = {line.file: line for line in (*program.called_from, program.watched_at) if line is not None}
    for form in forms[:1]:
        if form.value is not None and form.was is not None:
            rates = (first_settings.with_rate(place, form.call, form.was, form.value) for place in places.values())
            return next(filter(None, rates), None)
    return None


def _of_state(remedy: Remedy, incident: Incident, program: Program) -> str | None:
    """Returns the diff that puts what outlives the step into float32.

    That is a tensor that the loop carries, a module with its buffers, or the weights.
    """
    if incident.trigger == Trigger.NONFINITE_CARRIED:
        return half.tensor_in_float32(incident.source) if incident.source is not None else None
    if incident.trigger == Trigger.BUFFER_STANDS_STILL and remedy.verified:
        kept = half.tensor_in_float32(incident.source) if incident.source is not None else None
        return _of_norm(incident, program) or kept
    is_of_weights = incident.cause in _OF_WEIGHTS or remedy.kind == Form.OPTIMIZER_IN_FLOAT32
    return own_words.of_weights(program) if is_of_weights else None


def _of_norm(incident: Incident, program: Program) -> str | None:
    """A batch norm in float32: it takes values of a half dtype, and gives them again."""
    if _function(incident) not in _KEPT_BY_OP or not incident.module:
        return None
    return own_words.of_widened(incident.module, program)


def _of_constant(incident: Incident, reason: ConstantLost) -> str | None:
    """A constant that its dtype holds: of an optimizer where it is made, else in the line that failed."""
    below_one = reason.becomes == 1.0
    value = 1 - rounding.EPSILON.get(reason.dtype, 1e-3) if below_one else _round_eps(reason.dtype)
    if incident.phase == Phase.OPTIMIZER:
        return first_settings.with_eps(incident.source, value) if incident.source is not None else None
    if incident.source is None:
        return None
    tried = FormTried(
        form=Form.CONSTANT, call=_function(incident), source=incident.source, value=value, was=reason.value
    )
    return own_words.of_form(tried) or first_settings.with_number(incident.source, reason.value, value)


def _of_eps(remedy: Remedy, incident: Incident) -> str | None:
    """The eps that an optimizer was tried with, where it is made; None where several were."""
    forms = [each.form for each in incident.tried if each.form is not None and each.form.form == remedy.kind]
    values = {form.value for form in forms if form.value is not None}
    if incident.source is None or len(values) != 1:
        return None
    return first_settings.with_eps(incident.source, values.pop())


def _round_eps(dtype: str) -> float:
    """The smallest power of ten that is a normal number of the dtype."""
    return float(f"1e{ceil(log10(rounding.safe_eps(dtype)))}")


def _of_logarithm(incident: Incident) -> str | None:
    call = _function(incident)
    dtype = incident.inputs[0].dtype if incident.inputs else ""
    if call not in _LOGARITHMS or not dtype or incident.phase != Phase.FORWARD:
        return None
    bound = _round_eps(dtype)
    return own_words.of_form(
        FormTried(form=Form.OPERAND_BOUND, call=call, source=incident.source, argument=0, value=bound)
    )


def _function(incident: Incident) -> str:
    """``log`` of ``aten.log.default``."""
    return incident.op.split(".")[1] if incident.op.count(".") >= 1 else incident.op
