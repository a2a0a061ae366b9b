"""An incident in full: its line, its way, its operands, what was tried and what to change, one section each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ampscope.analysis.origin.closeup import Closeup
from ampscope.analysis.results import Incident
from ampscope.report.figures.magnitudes import magnitudes
from ampscope.report.figures.path_graph import path_graph
from ampscope.report.html.document import paragraph, section
from ampscope.report.html.figures.magnitudes import magnitudes_html
from ampscope.report.html.figures.path_graph import path_graph_html
from ampscope.report.html.markup import as_html, link_html
from ampscope.report.html.parts.card import Item, remedies_html
from ampscope.report.html.parts.evidence import found, operand_table
from ampscope.report.html.parts.last_good import last_good_html
from ampscope.report.html.parts.replays import replay_table
from ampscope.report.html.source import listing
from ampscope.trace.schema import Trigger
from ampscope.trace.vocabulary import Severity

#: Parameters named before the rest is only counted.
NAMED = 12
_BAD_GRADIENTS = "Gradients that were not finite"
#: What the parameters of an incident are, where it is something else than gradients that are not finite.
_TRIPPED: dict[str, str] = {
    Trigger.LOST_GRADIENT: "Gradients that lost a part of themselves",
    Trigger.ABSORBED_OVERFLOW: "Gradients that lost a part of themselves",
    Trigger.NONFINITE_BUFFER: "Buffers that were not finite",
    Trigger.NONFINITE_STATE: "State that was not finite",
    Trigger.NONFINITE_WEIGHT: "Weights that were not finite",
}


def item_sections(item: Item, seen: Closeup) -> str:
    """The sections of an incident or finding below its card, whichever of them it has."""
    calm = item.severity is Severity.INFO
    lines = listing(seen.lines, item.source, calm=calm) if item.source and len(seen.lines) > 1 else ""
    parts = [
        section("What to change", remedies_html(item) if item.remedies else "", level=3),
        section("Your line", lines, level=3, on_paper=False),
    ]
    return "".join(parts) + (_evidence(item, seen) if isinstance(item, Incident) else "")


def _evidence(incident: Incident, seen: Closeup) -> str:
    operands = (*incident.inputs, *incident.outputs)
    parts = {
        "From the origin to what it reached": path_graph_html(path_graph(incident, seen)),
        "Since the last good step": last_good_html(incident.last_good),
        "What was tried": replay_table(incident.tried, incident.trigger),
        "How it was found": "".join(map(paragraph, found(incident))),
        "What the op read and wrote": operand_table(operands),
        "Magnitudes": magnitudes_html(magnitudes(operands, incident.tried)),
        tripped_heading(incident.trigger): tripped_html(incident.tripped),
    }
    return "".join(section(title, content, level=3, on_paper=False) for title, content in parts.items())


def tripped_heading(trigger: str) -> str:
    """What is the matter with the parameters that an incident names."""
    return _TRIPPED.get(trigger, _BAD_GRADIENTS)


def tripped_html(names: Sequence[str], way: Callable[[str], str] = lambda _: "") -> str:
    """The parameters that tell of an incident; the first by name, the rest counted.

    Args:
        names: The parameters.
        way: The address that a name leads to; empty for nowhere.
    """
    if not names:
        return ""
    shown = "<br>".join(link_html(way(name), as_html(name, 120)) for name in names[:NAMED])
    more = f"and {len(names) - NAMED:,} more parameters" if len(names) > NAMED else ""
    return f'<div class="amp-code amp-names">{shown}</div><div class="amp-place">{more}</div>'
