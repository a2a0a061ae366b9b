"""Cards and what stands beside them: facts as tiles, ticks of what was checked, what healing changed, bars."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ampscope.analysis.causes.catalogue import what_in_words
from ampscope.analysis.diagnosis.run_summary import what_happened
from ampscope.analysis.overview.overview import Overview
from ampscope.analysis.precision.precision import Precision
from ampscope.analysis.results import Diagnosis, Finding, Incident, Remedy, ScaleHealth
from ampscope.analysis.usage.mistakes import UsageCheck
from ampscope.analysis.words import capitalized, in_words, received_in_words, when_in_words
from ampscope.report import numbers
from ampscope.report.diagnosis_words import TITLE, cure_in_words, number_line, remedy_in_words
from ampscope.report.figures.precision_bars import step_bars
from ampscope.report.html.bars_svg import share_bars_html
from ampscope.report.html.markup import as_code, as_html, source_html
from ampscope.report.numbers import UNKNOWN, count, seconds, share
from ampscope.report.safe_text import short
from ampscope.trace.vocabulary import Severity, Verdict

#: The newest step ran with another one where it was skipped, or where the scale has just grown.
NEXT_SCALE = "loss scale of the next step"
#: What, its value, and where it is not well the severity.
Fact = tuple[str, str] | tuple[str, str, str]
#: Where a name may be broken: ``Relation|Classifier``, ``my_|model``.
_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=_)(?=[a-z])")


def tiles_html(facts: Sequence[Fact]) -> str:
    """A row of facts; it wraps where the window is narrow."""
    return f'<div class="amp-tiles">{"".join(_tile(*fact) for fact in facts)}</div>'


def run_tiles(seen: Overview, diagnosis: Diagnosis) -> list[Fact]:
    """A run's extent and cost, most asked first."""
    info = diagnosis.run
    versions = [f"{name} {version}" for name, version in info.versions.items() if name in ("torch", "python")]
    took = f", {seconds(seen.step_seconds)} each" if seen.step_seconds is not None else ""
    settled, whole = (share(part, missing=UNKNOWN) for part in (seen.settled_share, seen.observing_share))
    observing = [("of the time spent on observing", settled)]
    if settled != whole:  # the first steps are looked at closely
        observing = [
            ("of the time spent on observing, newest half of the steps", settled),
            ("of the time spent on observing, all steps", whole),
        ]
    return [
        (f"optimizer steps{took}", count(seen.steps)),
        (f"skipped ({count(seen.skipped, 'step')})", share(seen.skipped_share) if seen.steps else "none yet"),
        scale_tile(seen.scale, [one for one in diagnosis.scale if one.optimizer == seen.optimizer]),
        *observing,
        (f"{count(info.parameters)} parameters", short(info.model, 40) or "unnamed model"),
        (short(", ".join(versions), 60) or "versions unknown", short(info.device, 40) or "device unknown"),
    ]


def scale_tile(scale: float | None, health: Iterable[ScaleHealth]) -> Fact:
    """The scale that the next step is run with; an alarm where its history is not well."""
    words = in_words(scale) if scale is not None else "none"
    unwell = next((one for one in health if not one.verdict.is_calm), None)
    return (NEXT_SCALE, words) if unwell is None else (NEXT_SCALE, words, unwell.severity.value)


def thinned_note(seen: Overview) -> str:
    """Says which values the curves of a long run do not show any more; empty where they show all."""
    if not seen.thinned:
        return ""
    return (
        f"Of {count(seen.thinned)} old steps the disk budget has left no loss, gradient norm and learning rate: where "
        "they are missing, the curves show the smallest and largest values. Counts, skips and loss scales are whole."
    )


def _tile(what: str, value: str, kind: str = "") -> str:
    return f'<div class="amp-tile {kind}"><b>{_WORD.sub("<wbr>", as_html(value))}</b><span>{as_html(what)}</span></div>'


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
    return f"{capitalized(words)}, {when_in_words(item)}"


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


def checks_html(checks: Sequence[UsageCheck]) -> str:
    """One line for each check: done right, mistaken, otherwise but harmless, or of no use in this run."""
    return f'<ul class="amp-checks">{"".join(map(_check, checks))}</ul>'


def _check(check: UsageCheck) -> str:
    if check.found:
        kind, sign, word = "failed", "\N{MULTIPLICATION X}", numbers.count(check.found, "mistake")
    elif check.noted:
        kind, sign, word = "noted", "\N{EN DASH}", "not everywhere, but too seldom to matter"
    elif check.applies:
        kind, sign, word = "passed", "\N{CHECK MARK}", ""
    else:
        kind, sign, word = "idle", "\N{EN DASH}", "no scaler in this run"
    note = f' <span class="amp-place">{word}</span>' if word else ""
    spoken = {"failed": "mistaken", "passed": "right", "noted": "harmless", "idle": "does not apply"}[kind]
    return f'<li class="{kind}"><span role="img" aria-label="{spoken}">{sign}</span>{as_html(check.words)}{note}</li>'


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


def precision_html(seen: Precision) -> str:
    """The bars under a sentence; empty where no step was traced."""
    if seen.step is None or not seen.modules:
        return ""
    regions = " and ".join(seen.autocast)
    autocast = f"Autocast was on, in {regions}." if regions else "Autocast was off."
    return f"<p>{as_html(f'Step {seen.step:,}. {autocast}')}</p>{share_bars_html(step_bars(seen))}"
