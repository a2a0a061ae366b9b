"""Loops as people write them: those of the manuals draw no finding, each mistake its own; all are told by the protocol.

Each is trained once for both, and under watch to the same bits as without where it is correct.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ampscope.trace.vocabulary import Severity
from tests.integration.step_order.heard import heard
from tests.integration.step_order.protocol import assert_protocol
from tests.support.training.call_orders import RIGHT, WRONG
from tests.support.training.usage_bench import findings_of, found_in

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step", "ignore:.*different devices"),
    pytest.mark.usefixtures("device", "replays_have_room"),
]


@pytest.mark.parametrize("name", RIGHT)
def test_a_correct_loop_draws_no_finding(name: str, run_folder: Path) -> None:
    with heard() as trained:
        assert findings_of(RIGHT[name], run_folder) == ()
    assert_protocol(trained)


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_found_with_its_step_and_line(name: str, run_folder: Path) -> None:
    loop, cause, step = WRONG[name]
    with heard() as trained:
        diagnosis, _ = found_in(loop, run_folder)
    assert_protocol(trained)
    finding = diagnosis.findings[0]
    assert {each.cause for each in diagnosis.findings} == {cause}
    assert finding.step == step
    assert finding.source is not None
    own = getattr(loop, "func", loop).__code__.co_filename
    assert Path(finding.source.file).name in (Path(own).name, "usage_bench.py")
    assert finding.explanation
    assert finding.remedies[0].code
    assert diagnosis.primary == (None if finding.severity is Severity.INFO else finding)
