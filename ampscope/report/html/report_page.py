"""A run as one HTML file: the app's cards and figures, nothing to load, nothing that runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from ampscope.analysis.causes.catalogue import item_in_words
from ampscope.analysis.diagnosis.diagnosis import diagnose
from ampscope.analysis.overview.overview import Overview, overview
from ampscope.analysis.overview.rank_lives import ranks_at_a_glance
from ampscope.analysis.precision.precision import precision
from ampscope.analysis.results import Diagnosis
from ampscope.analysis.scale.scale_history import ScaleHistory, scale_history, scale_story
from ampscope.analysis.step_graph import closeup
from ampscope.analysis.words import when_in_words
from ampscope.report import numbers
from ampscope.report.figures.step_figures import scale_stack, timeline_stack
from ampscope.report.html.cards import (
    Item,
    healed_html,
    item_html,
    precision_html,
    run_tiles,
    scale_html,
    thinned_note,
    tiles_html,
    verdict_html,
    what,
)
from ampscope.report.html.incident_sections import item_sections
from ampscope.report.html.markup import as_html, document, paragraph, section
from ampscope.report.html.stack_svg import stack_html
from ampscope.report.html.tables_html import ranks_html
from ampscope.report.safe_text import place
from ampscope.report.terminal.diagnosis_text import run_facts
from ampscope.trace.read.run import Run, open_run
from ampscope.trace.vocabulary import Severity

#: Problems shown in full, and harmless events named; the rest is counted.
_IN_FULL, _NAMED = 12, 40


def page_of(path: str | os.PathLike[str]) -> str:
    """The report on the run in ``path``.

    Raises:
        RunError: the folder cannot be read.
    """
    with open_run(path) as run:
        return page(run, diagnose(run))


def page(run: Run, diagnosis: Diagnosis) -> str:
    """The report on a run, as an HTML file."""
    items = most_urgent_first(diagnosis)
    verdict = verdict_html(diagnosis) + scale_html(diagnosis)
    body = [_head(diagnosis), verdict + paragraph(diagnosis.note) + healed_html(diagnosis)]
    first = overview(run)
    for optimizer in first.optimizers or (None,):
        seen = overview(run, optimizer=optimizer) if optimizer != first.optimizer else first
        history = scale_history(run, optimizer=optimizer)
        name = f" of optimizer {optimizer}" if len(first.optimizers) > 1 else ""
        body += [_run(seen, diagnosis, items, name), _scale(history, seen, name)]
    body[2:2] = [_problem(run, item, diagnosis) for item in _problems(items)[:_IN_FULL]]
    body.append(ranks_html(ranks_at_a_glance(run)) if diagnosis.run.world > 1 else "")
    body.append(section("What ran in which dtype", precision_html(precision(run)), on_paper=False))
    return document(f"AMPscope: {diagnosis.run.name}", "".join([*body, *_rest(items), _foot(diagnosis)]))


def most_urgent_first(diagnosis: Diagnosis) -> list[Item]:
    """Everything noticed, what to read first first, harmless things last."""
    rank = list(Severity)
    items: list[Item] = [*diagnosis.incidents, *diagnosis.findings]
    ranked = sorted(items, key=lambda item: (rank.index(item.severity), item.step))
    return sorted(ranked, key=lambda item: item != diagnosis.primary)


def _problems(items: Sequence[Item]) -> list[Item]:
    return [item for item in items if item.severity is not Severity.INFO]


def _head(diagnosis: Diagnosis) -> str:
    run = diagnosis.run
    began = f"Started {numbers.moment(run.created)}. " if run.created else ""
    return (
        f'<header><div class="amp-place">AMPscope report</div><h1>{as_html(run.name, 160)}</h1>'
        f'<div class="amp-place">{as_html(began + run_facts(run), 600)}</div></header>'
    )


def _problem(run: Run, item: Item, diagnosis: Diagnosis) -> str:
    below = item_sections(item, closeup(run, item))
    if item == diagnosis.primary:  # its card is at the top
        return section("The problem close up", below)
    return section(what(item), item_html(item, titled=False) + below, on_paper=False)


def _run(seen: Overview, diagnosis: Diagnosis, items: Sequence[Item], name: str) -> str:
    tiles = tiles_html(run_tiles(seen, diagnosis))
    if not seen.steps:
        return section(f"The run{name}", tiles + paragraph("No optimizer step has been recorded."))
    note = paragraph(thinned_note(seen)) if seen.thinned else ""
    return section(f"The run{name}", tiles + stack_html(timeline_stack(seen, items)) + note)


def _scale(history: ScaleHistory, seen: Overview, name: str) -> str:
    if not history.is_scaled:
        return ""
    words = paragraph(" ".join(scale_story(history))) + _health(history)
    drawn = stack_html(scale_stack(history, seen.moments))
    return section(f"The loss scale{name}", words + drawn, on_paper=False)


def _health(history: ScaleHistory) -> str:
    """Says what is wrong with the loss scale; empty where it does what scales do."""
    health = history.health
    return "" if health is None or health.verdict.is_calm else paragraph(health.explanation)


def _rest(items: Sequence[Item]) -> Iterator[str]:
    problems = _problems(items)
    if len(problems) > _IN_FULL:
        yield paragraph(f"{len(problems) - _IN_FULL:,} more problems are not shown here; the app has all of them.")
    harmless = [item for item in items if item.severity is Severity.INFO]
    lines = "".join(f"<li>{_line(item)}</li>" for item in harmless[:_NAMED])
    more = paragraph(f"and {len(harmless) - _NAMED:,} more") if len(harmless) > _NAMED else ""
    listed = f"<ul>{lines}</ul>{more}" if harmless else ""
    yield section("Harmless, nothing to change", listed, on_paper=False)


def _line(item: Item) -> str:
    where = f" ({place(item.source)})" if item.source else ""
    return as_html(f"{when_in_words(item)}: {item_in_words(item)}{where}. {item.explanation}", 600)


def _foot(diagnosis: Diagnosis) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in sorted(diagnosis.run.versions.items()))
    words = f"Written by AMPscope from {diagnosis.run.path}. Recorded with {versions or 'unknown versions'}."
    on_paper = (
        '<p class="amp-on-paper">The evidence, the loss scale and the dtypes are in the file this was printed from.</p>'
    )
    return f'<footer class="amp-place">{on_paper}{as_html(words, 900)}</footer>'
