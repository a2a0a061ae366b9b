"""All forms, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ampscope.cures.call_form import CallForm, CallPlace
from ampscope.cures.cure_form import CureForm
from ampscope.cures.failed_op import FailedOp
from ampscope.cures.forms import (
    bounds,
    constants,
    empty_rows,
    exponentials,
    float32,
    logarithms,
    products,
    safe_where,
    variance,
    whole_step,
)
from ampscope.trace.schema import Form

FORMS: tuple[CureForm, ...] = (
    *logarithms.FORMS,
    *exponentials.FORMS,
    *variance.FORMS,
    *constants.FORMS,
    *products.FORMS,
    *float32.FORMS,
    *empty_rows.FORMS,
    *safe_where.FORMS,
    *bounds.FORMS,
    *whole_step.FORMS,
)
_BY_NAME: dict[str, CureForm] = {each.form: each for each in FORMS}
_LIVE = {kind.live_as: kind for each in FORMS for kind in each.live}
#: A form that a later version has recorded.
_UNKNOWN = CureForm(
    form=Form.CONSTANT,
    tried=lambda asked: f"another form of {asked.call or 'a call'}",
    sentence=lambda asked: f"Give {asked.call or 'the call'} another form.",
)


def cure_form(form: str) -> CureForm:
    """A form by the name that traces give it; one that this version does not know is told in general words."""
    return _BY_NAME.get(form, _UNKNOWN)


def call_forms(failed: FailedOp) -> Iterator[CallForm]:
    """The forms to try on a failed op, the most promising first."""
    for each in FORMS:
        for rule in each.rules:
            yield from rule(failed)


def read_form(written: Any) -> tuple[CallForm, CallPlace] | None:
    """A form and its place, from what was written of them; None where they are not known here."""
    kind = _LIVE.get(str(written.get("is"))) if isinstance(written, Mapping) else None
    if kind is None:
        return None
    at = CallPlace(str(written.get("file", "")), int(written.get("line", 0)))
    return kind.read(written, at), at
