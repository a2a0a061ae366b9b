"""What was checked of a loop, as a list of ticks."""

from __future__ import annotations

from collections.abc import Sequence

from ampscope.analysis.usage.usage_checks import Check
from ampscope.report import numbers
from ampscope.report.html.markup import as_html


def checks_html(checks: Sequence[Check]) -> str:
    """One line for each check: done right, mistaken, otherwise but harmless, or of no use in this run."""
    return f'<ul class="amp-checks">{"".join(map(_check, checks))}</ul>'


def _check(check: Check) -> str:
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
