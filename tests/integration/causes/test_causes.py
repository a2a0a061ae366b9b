"""Causes are named however they come about in a real training loop, and harmless twins of theirs raise no alarm.

The plainest loop of each cause is the sample of its page: `tests.integration.causes.test_samples`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ampscope.analysis.results import Incident
from ampscope.trace.vocabulary import Severity, Verdict
from tests.integration.causes.failures import FAILURES, Failure
from tests.integration.causes.harmless import HARMLESS, Harmless
from tests.integration.causes.measured import MEASURED, MEASURED_HARMLESS
from tests.integration.causes.trained import diagnosed


@pytest.mark.parametrize("known", [*FAILURES, *MEASURED], ids=lambda known: known.name.replace(" ", "-"))
def test_it_is_named(known: Failure, run_folder: Path) -> None:
    diagnosis = diagnosed(known.loop, run_folder)
    primary = diagnosis.primary
    assert isinstance(primary, Incident), diagnosis.summary
    assert (primary.cause, primary.phase) == (known.cause, known.phase), diagnosis.summary
    assert (primary.step, primary.op, primary.module) == (known.step, known.op, known.module), diagnosis.summary
    assert known.says in primary.explanation
    assert primary.remedies


@pytest.mark.parametrize("known", [*HARMLESS, *MEASURED_HARMLESS], ids=lambda known: known.name.replace(" ", "-"))
def test_its_harmless_twin_raises_no_alarm(known: Harmless, run_folder: Path) -> None:
    diagnosis = diagnosed(known.loop, run_folder)
    assert (diagnosis.verdict, diagnosis.primary) == (Verdict.HEALTHY, None), diagnosis.summary
    assert {incident.severity for incident in diagnosis.incidents} <= {Severity.INFO}
    if known.cause is not None:
        assert known.cause in {incident.cause for incident in diagnosis.incidents}
