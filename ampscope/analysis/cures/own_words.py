"""Remedies as diffs of the user's own lines."""

from __future__ import annotations

from ampscope.analysis.cures.rewriting import Edit, rewritten
from ampscope.analysis.cures.rewriting.changed_file import diff_at
from ampscope.analysis.results import CodeLine, FormTried
from ampscope.trace.schema import Form


def of_form(tried: FormTried) -> str | None:
    """Another form of a call as a diff of the line that makes it; None where that line cannot be changed so."""
    place = tried.source
    if place is None or tried.form not in Form._value2member_map_:
        return None

    def write(code: str, row: int | None) -> Edit | None:
        return rewritten(
            CodeLine(place.file, place.line, code),
            Form(tried.form),
            tried.call,
            argument=tried.argument,
            value=tried.value,
            was=tried.was,
            row=row,
        )

    return diff_at(place, write)
