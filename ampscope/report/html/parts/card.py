"""The card at the top: what happened, where, why, and what to do next."""

from __future__ import annotations

from ampscope.analysis.causes.catalogue import what_in_words
from ampscope.analysis.diagnosis.run_summary import what_happened
from ampscope.analysis.results import Diagnosis, Finding, Incident, Remedy, ScaleHealth
from ampscope.analysis.words import in_words, received_in_words, when_in_words
from ampscope.report import numbers
from ampscope.report.html.markup import as_code, as_html
from ampscope.report.html.source import source_html
from ampscope.report.wording.number_line import number_line
from ampscope.report.wording.remedy_words import remedy_in_words
from ampscope.trace.vocabulary import Severity, Verdict

Item = Incident | Finding

_MARKS = {True: "good", False: "warning", None: "info"}


def verdict_html(diagnosis: Diagnosis) -> str:
    """The one thing to tell first; a healthy run says so calmly."""
    primary = diagnosis.primary
    if primary is None:
        return _calm(diagnosis)
    after = "".join(f"{as_html(each.text, 1000)} {remedy_mark(primary, each)}" for each in primary.remedies[:1])
    return item_html(primary, after=after)


def scale_html(diagnosis: Diagnosis) -> str:
    """A card for each loss scale that is not well; empty where all are."""
    several = len(diagnosis.scale) > 1
    return "".join(_scale_card(health, several, diagnosis) for health in diagnosis.scale if not health.verdict.is_calm)


def _scale_card(health: ScaleHealth, several: bool, diagnosis: Diagnosis) -> str:
    of = f" of optimizer {health.optimizer}" if several else ""
    title = f"The loss scale{of}: {health.verdict.value}, {in_words(health.current)} in the newest step"
    told = diagnosis.primary.explanation if diagnosis.primary is not None else diagnosis.summary
    why = "" if health.explanation in told else health.explanation
    lost = f"{health.skipped:,} of {numbers.count(health.steps, 'step')} ({numbers.share(health.lost_share)})"
    return card(health.severity, title, [("Why", as_html(why, 2000)), ("Skipped", lost)])


def item_html(item: Item, *, titled: bool = True, ranks: str = "", after: str = "") -> str:
    """One incident or finding: what was seen and why in a sentence or two, its numbers, and where.

    Args:
        item: It; a harmless one says that it is.
        titled: With its cause and its steps as a title.
        ranks: The ranks it concerns as HTML, in the place of a sentence.
        after: What to do next, as HTML.
    """
    happened = "Harmless: nothing needs to change." if item.severity == Severity.INFO else what_happened(item)
    title = what(item) if titled else ""
    if isinstance(item, Finding) and titled and item.severity != Severity.INFO:
        happened = ""  # its title says it
    got = ranks or (as_html(received_in_words(item)) if isinstance(item, Incident) else "")
    lead = as_html(" ".join(filter(None, (happened, item.explanation))), 2400)
    facts = [("Where", _where(item)), ("Ranks", got), ("Next", after)]
    return card(item.severity, title, facts, lead=lead, numbers=as_html(number_line(item)))


def remedies_html(item: Item) -> str:
    """The remedies in the order of the diagnosis, which puts the best first, each with its code."""
    return f'<ol class="amp-remedies">{"".join(_remedy(item, each) for each in item.remedies)}</ol>'


def remedy_mark(item: Item, remedy: Remedy) -> str:
    """Whether a replay tried the remedy; nothing for a finding, on which none can be tried."""
    if not isinstance(item, Incident):
        return ""
    return f'<span class="amp-chip {_MARKS[remedy.verified]}">{as_html(remedy_in_words(remedy), 400)}</span>'


def what(item: Item) -> str:
    """The cause and the steps."""
    words = what_in_words(item)
    return f"{words[:1].upper()}{words[1:]}, {when_in_words(item)}"


def _remedy(item: Item, remedy: Remedy) -> str:
    shown = remedy.diff or remedy.code
    code = f'<pre class="amp-code">{as_code(shown)}</pre>' if shown else ""
    return f"<li>{as_html(remedy.text, 1000)} {remedy_mark(item, remedy)}{code}</li>"


def _calm(diagnosis: Diagnosis) -> str:
    kind = "good" if diagnosis.verdict == Verdict.HEALTHY else "warning"
    events = len(diagnosis.incidents) + len(diagnosis.findings)
    facts = [("Seen", f"{numbers.count(events, 'harmless event')}, listed below.")] if events else []
    return card(kind, diagnosis.summary, facts)


def card(kind: str, title: str, facts: list[tuple[str, str]], *, lead: str = "", numbers: str = "") -> str:
    """A card: a title and what there is to say in HTML over ``(what, HTML)``; facts without HTML are left out."""
    rows = "".join(f"<span>{name}</span><div>{body}</div>" for name, body in facts if body)
    said = (("title", as_html(title, 600)), ("lead", lead), ("number-line", numbers))
    head = "".join(f'<div class="amp-{name}">{body}</div>' for name, body in said if body)
    return f'<div class="amp-card {kind}">{head}<div class="amp-facts">{rows}</div></div>'


def _where(item: Item) -> str:
    op = _op_in(item) if isinstance(item, Incident) else ""
    if not op and item.source is None:
        return "" if item.severity == Severity.INFO else "Not known."
    return f"<div>{as_html(op)}</div>{source_html(item.source, hit=True)}" if op else source_html(item.source, hit=True)


def _op_in(incident: Incident) -> str:
    kind = f" ({incident.module_type})" if incident.module_type else ""
    unnamed = "in the model itself" if incident.module_type else "outside the watched modules"
    inside = f" in {incident.module}{kind}" if incident.module else f" {unnamed}{kind}"
    return f"{incident.op}{inside}, {incident.phase}" if incident.op else ""
