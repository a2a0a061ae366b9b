"""One statement of someone's program with a cure in it: their words, and the cure in the place that was meant."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ampscope.analysis.rewriting.edit import Edit
from ampscope.analysis.rewriting.forms import bounds, constants, dtype_words, logarithms, masks, products
from ampscope.analysis.rewriting.found_call import Asked
from ampscope.analysis.rewriting.names import Scope
from ampscope.analysis.rewriting.source_file import HasPlace
from ampscope.analysis.rewriting.statement import Splice, Statement, statement
from ampscope.trace.schema import Form

#: How each form is written; what is no form of one statement is missing.
_WRITERS: dict[Form, Callable[[Statement, Asked], Sequence[Splice]]] = {
    Form.OPERAND_BOUND: bounds.operand_bound,
    Form.ADDED_EPS: bounds.added_eps,
    Form.CONSTANT: constants.constant,
    Form.SCALE_FIRST: products.scale_first,
    Form.SAFE_WHERE: masks.safe_where,
    Form.IN_FLOAT32: dtype_words.in_float32,
}
#: Those that leave alone what is so already.
_KEPT = frozenset({Form.OPERAND_BOUND, Form.ADDED_EPS})
#: The same of those that show in the statement alone.
_PATTERNS: dict[Form, Callable[[Statement], Sequence[Splice]]] = {
    Form.LOG_SOFTMAX: logarithms.log_softmax,
    Form.LOGSIGMOID: logarithms.logsigmoid,
    Form.WITH_LOGITS: logarithms.with_logits,
    Form.CROSS_ENTROPY: logarithms.cross_entropy,
    Form.LOGSUMEXP: logarithms.logsumexp,
    Form.MAX_OFF: logarithms.max_off,
    Form.CENTRED: products.centred,
    Form.KEPT_ROWS: masks.kept_rows,
    Form.ZERO_INFINITY: masks.zero_infinity,
}


def rewritten(
    line: HasPlace,
    form: Form,
    call: str,
    *,
    argument: int | None = None,
    value: float | None = None,
    was: float | None = None,
    row: int | None = None,
    scope: Scope | None = None,
) -> Edit | None:
    """A line of someone's program with a cure in it.

    Args:
        line: The line, or the whole statement where it goes over several.
        form: What is done to the call.
        call: The torch function that is called there, as code spells it.
        argument: Which operand the change is about, from 0; a method's tensor is 0.
        value: The number that goes in.
        was: The number that stood there.
        row: Of a statement over several lines: on which of them the call is made, from 0.
        scope: Where the statement stands in its program; None where that is not at hand.

    Returns:
        The change; None where the line cannot be parsed, where it is not clear which call is meant, and where the
        line already does it.
    """
    parsed = statement(line.code, row, scope)
    if parsed is None or any(each is not None and math.isnan(each) for each in (value, was)):
        return None
    asked = Asked(call.rpartition(".")[2], argument, value, was)
    splices = _PATTERNS[form](parsed) if form in _PATTERNS else ()
    if form in _WRITERS:
        splices = _WRITERS[form](parsed, asked)
    first: tuple[str, ...] = ()
    if form is Form.SAFE_WHERE and not splices:
        first, splices = masks.named_operand(parsed, asked)
    after = _spliced(parsed, splices, form, asked)
    imports = parsed.needs(after, [each.partition(" = ")[0] for each in first]) if after is not None else None
    return Edit(line.code, after, imports, first) if after is not None and imports is not None else None


def _spliced(parsed: Statement, splices: Sequence[Splice], form: Form, asked: Asked) -> str | None:
    """The statement with them; of calls inside each other, as ``log(log(x))``, the inner ones first."""
    inner = [each for each in splices if not any(other != each and _holds(each, other) for other in splices)]
    after = parsed.changed(inner) if inner else None
    if after is None or len(inner) == len(splices) or form not in _KEPT:
        return after if len(inner) == len(splices) else None
    again = statement(after, parsed.row, parsed.scope)
    rest = _WRITERS[form](again, asked) if again is not None else ()
    done = again is None or len(rest) >= len(splices)
    return None if done or again is None else _spliced(again, rest, form, asked)


def _holds(one: Splice, other: Splice) -> bool:
    return one.start <= other.start and other.end <= one.end
