"""Planted trainings leave no trace in the process; the run of all of them ends with a table of what was found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

#: Name of the property under which a test tells what it planted; empty for a healthy training.
PLANTED = "planted"
#: Names of properties that tell of the first remedy, where they hold.
CURES, IS_DIFF, CHANGES_GOOD = "a replay has proved it", "it is a change of a line", "it changes good values"


@pytest.fixture(autouse=True)
def quiet_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fault of AMPscope's own ends the test."""
    from ampscope.capture.torch_support import guard

    monkeypatch.setattr(guard, "RAISE", True)
    with torch.random.fork_rng(devices=[]):
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [each for outcome in ("passed", "failed") for each in terminalreporter.stats.get(outcome, [])]
    told = [(dict(each.user_properties), each) for each in reports]
    planted = [(properties[PLANTED], each) for properties, each in told if PLANTED in properties]
    if not any("plants_full" in each.keywords for _, each in planted):
        return
    right: dict[str, list[bool]] = defaultdict(list)
    remedies: dict[str, int] = defaultdict(int)
    for plant, report in planted:
        right[plant].append(report.passed)
        for name in (CURES, IS_DIFF, CHANGES_GOOD):
            remedies[name] += name in dict(report.user_properties)
    healthy = right.pop("", [])
    found, all_of_them = sum(map(sum, right.values())), sum(map(len, right.values()))
    terminalreporter.section("plants")
    for plant, passed in right.items():
        terminalreporter.line(f"{plant:<50} {sum(passed):>3} of {len(passed):>3}")
    terminalreporter.line(f"{'plants found':<50} {found:>3} of {all_of_them:>3}")
    for name, count in remedies.items():
        terminalreporter.line(f"{f'first remedy: {name}':<50} {count:>3} of {all_of_them:>3}")
    terminalreporter.line(f"{'false alarms in healthy trainings':<50} {healthy.count(False):>3} in {len(healthy):>3}")
