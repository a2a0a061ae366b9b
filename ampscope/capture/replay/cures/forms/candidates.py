"""Which other forms of the failed call are worth a replay, the most promising first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ampscope.capture.replay.cures.forms.call_form import CallForm
from ampscope.capture.replay.cures.forms.failed_call import FailedCall, failed_call
from ampscope.capture.replay.cures.forms.form_change import OtherForm
from ampscope.capture.replay.cures.forms.mathematics import bounds
from ampscope.capture.tracing.traced_rows import TracedRows

#: What gives forms for a failed call, by what has gone wrong there.
Rule = Callable[[FailedCall], Iterator[CallForm]]

#: For what is wrong in every dtype.
OF_MATHEMATICS: tuple[Rule, ...] = (bounds.of_logarithm,)


def forms(rows: TracedRows, rules: tuple[Rule, ...]) -> Iterator[OtherForm]:
    """The changes to try on a step that failed.

    Args:
        rows: The records of its faithful replay.
        rules: What gives forms, first what is most promising.
    """
    call = failed_call(rows)
    if call is None or not call.site.file:
        return
    for rule in rules:
        for form in rule(call):
            yield OtherForm(form, form.at or call.place)
