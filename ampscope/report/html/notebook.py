"""Results as Jupyter shows them: the same cards and figures as in the app and the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ampscope.analysis.causes.catalogue import item_in_words
from ampscope.analysis.diagnosis.diagnosis import diagnose
from ampscope.analysis.overview.overview import Overview, overview
from ampscope.analysis.precision.precision import Precision
from ampscope.analysis.results import Diagnosis, Finding, Incident
from ampscope.analysis.scale.scale_history import ScaleHistory, scale_story
from ampscope.analysis.step_graph import IncidentSurroundings, closeup
from ampscope.analysis.words import when_in_words
from ampscope.errors import AmpscopeError
from ampscope.report.figures.step_figures import scale_stack, timeline_stack
from ampscope.report.html.cards import Item, item_html, precision_html, run_tiles, tiles_html, verdict_html
from ampscope.report.html.incident_sections import item_sections
from ampscope.report.html.markup import SHEET, paragraph, section, style_of
from ampscope.report.html.report_page import most_urgent_first
from ampscope.report.html.stack_svg import stack_html
from ampscope.report.html.tables_html import table_html
from ampscope.report.safe_text import place
from ampscope.trace.read.run import Run

#: Rows of the list of what was noticed.
_LISTED = 30
_STYLE = style_of("notebook")


def notebook_html(result: object) -> str | None:
    """``result`` as HTML; None where it is of no kind that has a view, or cannot be read: then its text is shown."""
    view = next((view for kind, view in _VIEWS.items() if isinstance(result, kind)), None)
    if view is None:
        return None
    try:
        return f'<div class="amp-shown"><style>{SHEET}{_STYLE}</style>{view(result)}</div>'
    except AmpscopeError:
        return None


def _run(run: Run) -> str:
    diagnosis, seen = diagnose(run), overview(run)
    items = most_urgent_first(diagnosis)
    tiles = tiles_html(run_tiles(seen, diagnosis))
    primary = diagnosis.primary
    close = item_sections(primary, closeup(run, primary)) if primary is not None else ""
    return f"{verdict_html(diagnosis)}{tiles}{_timeline(seen, items)}{close}{_noticed(items)}"


def _diagnosis(diagnosis: Diagnosis) -> str:
    primary = diagnosis.primary
    below = item_sections(primary, IncidentSurroundings()) if primary is not None else ""
    return f"{verdict_html(diagnosis)}{below}{_noticed(most_urgent_first(diagnosis))}"


def _item(item: Item) -> str:
    return item_html(item) + item_sections(item, IncidentSurroundings())


def _noticed(items: Sequence[Item]) -> str:
    """All that was noticed, a row each, where there is more than one thing."""
    rows = [(when_in_words(item), item_in_words(item), item.severity.value, place(item.source)) for item in items]
    columns = ("When", "What", "How bad", "Your line")
    return section("Everything noticed", table_html(columns, rows[:_LISTED]) if len(rows) > 1 else "", level=3)


def _overview(seen: Overview) -> str:
    return _timeline(seen, ())


def _timeline(seen: Overview, items: Sequence[Item]) -> str:
    return stack_html(timeline_stack(seen, items)) if seen.steps else paragraph("No optimizer step yet.")


def _scale(history: ScaleHistory) -> str:
    if not history.is_scaled:
        return paragraph("No step of this run used a loss scale.")
    return paragraph(" ".join(scale_story(history))) + stack_html(scale_stack(history))


def _precision(seen: Precision) -> str:
    return precision_html(seen) or paragraph("No step of this run was traced op by op.")


_VIEWS: dict[type, Callable[[Any], str]] = {
    Run: _run,
    Diagnosis: _diagnosis,
    Incident: _item,
    Finding: _item,
    Overview: _overview,
    ScaleHistory: _scale,
    Precision: _precision,
}
