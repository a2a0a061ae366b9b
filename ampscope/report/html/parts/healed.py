"""What healing has changed in the run, as a card."""

from __future__ import annotations

from ampscope.analysis.results import Diagnosis
from ampscope.report.html.markup import as_code, as_html
from ampscope.report.wording.healing_words import TITLE, cure_in_words


def healed_html(diagnosis: Diagnosis) -> str:
    """Each change with the code that makes it permanent, and whether the failure has come back; empty where none."""
    since = f"<p>{as_html(diagnosis.since, 600)}</p>" if diagnosis.since else ""
    if not diagnosis.cures:
        return since
    rows = "".join(
        f"<li>{as_html(cure_in_words(cure), 900)}"
        + (f'<div class="amp-code">{as_code(cure.code)}</div>' if cure.code else "")
        + "</li>"
        for cure in diagnosis.cures
    )
    return f'<div class="amp-card"><div class="amp-title">{as_html(TITLE)}</div><ul>{rows}</ul></div>{since}'
