"""Facts side by side: a value in bold, what it is beneath."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ampscope.analysis.overview.overview import Overview
from ampscope.analysis.results import Diagnosis, ScaleHealth
from ampscope.analysis.words import in_words
from ampscope.report.html.markup import as_html
from ampscope.report.numbers import UNKNOWN, count, seconds, share
from ampscope.report.safe_text import short

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
    """What the curves of a long run do not show any more; empty where they show all."""
    if not seen.thinned:
        return ""
    return (
        f"Of {count(seen.thinned)} old steps the disk budget has left no loss, gradient norm and learning rate: where "
        "they are missing, the curves show the smallest and largest values. Counts, skips and loss scales are whole."
    )


def _tile(what: str, value: str, kind: str = "") -> str:
    return f'<div class="amp-tile {kind}"><b>{_WORD.sub("<wbr>", as_html(value))}</b><span>{as_html(what)}</span></div>'
