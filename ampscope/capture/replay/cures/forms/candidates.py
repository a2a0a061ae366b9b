"""Chooses the other forms of the failed call that are worth a replay, the most promising first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ampscope.capture.replay.cures import failure
from ampscope.capture.replay.cures.failure import Failure
from ampscope.capture.replay.cures.forms.call_form import CallForm
from ampscope.capture.replay.cures.forms.failed_call import FailedCall, failed_call
from ampscope.capture.replay.cures.forms.form_change import OtherForm
from ampscope.capture.replay.cures.forms.mathematics import (
    bounds,
    empty,
    exponentials,
    logarithms,
    safe_where,
    variances,
)
from ampscope.capture.replay.cures.forms.range import constants, float32_call, scale_first
from ampscope.capture.tracing.traced_rows import TracedRows

#: What gives forms for a failed call, by what has gone wrong there.
Rule = Callable[[FailedCall], Iterator[CallForm]]

#: The same by mathematics, computed another way.
AS_MEANT: tuple[Rule, ...] = (
    logarithms.of_likelihood,
    logarithms.of_logarithm,
    logarithms.of_cross_entropy,
    exponentials.of_quotient,
    variances.of_variance,
)
#: Without what has no value, or no slope: all else stays what it is.
SAFE: tuple[Rule, ...] = (
    empty.of_softmax,
    empty.of_ctc,
    empty.of_mean,
    empty.of_deviation,
    safe_where.of_masked,
    safe_where.of_slope,
)
#: An operand kept from where the call is not defined: it says something else there.
BOUNDS: tuple[Rule, ...] = (
    bounds.of_logarithm,
    bounds.of_division,
    safe_where.of_division,
    bounds.of_negative_root,
    bounds.of_slope,
    bounds.of_ends,
)
#: For what is wrong in every dtype.
OF_MATHEMATICS: tuple[Rule, ...] = (*AS_MEANT, *SAFE, *BOUNDS, bounds.of_exponential)
#: For what is well in float32.
OF_RANGE: tuple[Rule, ...] = (
    *AS_MEANT,
    constants.of_lost_constant,
    constants.of_literal,
    scale_first.of_product,
    float32_call.of_call,
    *SAFE,
    *BOUNDS,
)
#: The same where the code itself converts to half precision: then what a call is given is to be float32, not the call.
AS_CONVERTED = tuple(rule for rule in OF_RANGE if rule is not float32_call.of_call)


def forms(
    rows: TracedRows,
    rules: tuple[Rule, ...],
    *,
    located: Failure | None = None,
    wide: TracedRows | None = None,
) -> Iterator[OtherForm]:
    """The changes to try on a step that failed.

    Args:
        rows: The records of its faithful replay.
        rules: What gives forms, first what is most promising.
        located: Where it failed.
        wide: The records of the step with everything in float32, where that was finite.
    """
    call = failed_call(rows)
    if call is None or not call.site.file:
        return
    if located is not None and wide is not None:
        call.wide, call.wide_graph = failure.output_at(wide, located), wide.graph()
    for rule in rules:
        for form in rule(call):
            yield OtherForm(form, form.at or call.place)
