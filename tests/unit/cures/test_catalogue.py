"""Each form that a trace may name is in the catalogue, once and in its turn."""

from __future__ import annotations

import pytest

from ampscope.cures.catalogue import FORMS
from ampscope.cures.cure_form import TrialTurn
from ampscope.trace.schema import Form

NAMES = [each.form for each in FORMS]


@pytest.mark.parametrize("form", Form)
def test_a_form_is_known_once(form: Form) -> None:
    assert NAMES.count(form) == 1, f"{form.name} needs one CureForm in FORMS of a family of ampscope/cures/forms"


def test_forms_are_tried_in_their_turns() -> None:
    turns = [each.turn for each in FORMS if each.turn is not TrialTurn.NONE]
    assert turns == sorted(turns), "the families in ampscope/cures/catalogue.py do not follow each other by turns"


def test_a_form_that_lasts_has_a_name_of_its_own() -> None:
    names = [kind.live_as for each in FORMS for kind in each.live]
    assert all(names)
    assert len(set(names)) == len(names)
