"""What the browser's tab says: how the run on screen is, and its name."""

from __future__ import annotations

from pathlib import Path

from ampscope.analysis.results import Diagnosis, Incident
from ampscope.errors import AmpscopeError
from ampscope.report.safe_text import short
from ampscope.report.terminal.run_list import verdict_in_words
from ampscope.trace.schema import Trigger
from ampscope.trace.vocabulary import Verdict
from data.run_results import diagnosis_of
from data.run_snapshot import RunSnapshot

_NONFINITE = frozenset(one.value for one in Trigger if one.value.startswith("nonfinite"))
#: Characters of a run's name.
_LONGEST = 40


def tab_title(run: RunSnapshot, *, with_verdict: bool) -> str:
    """``NaN @87 my-run``; of a run in which nothing broke its name alone.

    Args:
        run: The run on screen.
        with_verdict: Whether to say how it is, which on a first look takes a while.
    """
    try:
        state = _state(diagnosis_of(run)) if with_verdict else ""
    except AmpscopeError:
        state = ""  # the page says so
    return f"{state}{short(Path(run.path).name, _LONGEST)} - AMPscope"


def _state(diagnosis: Diagnosis) -> str:
    primary = diagnosis.primary
    if diagnosis.verdict is Verdict.HEALTHY or primary is None:
        return ""
    is_nan = isinstance(primary, Incident) and primary.trigger in _NONFINITE
    return f"{'NaN' if is_nan else verdict_in_words(diagnosis.verdict)} @{primary.step} "
