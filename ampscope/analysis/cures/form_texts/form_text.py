"""How one form of a call is told."""

from __future__ import annotations

from collections.abc import Callable

from ampscope.analysis.results import FormTried
from ampscope.analysis.words.number_words import in_code, number


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
