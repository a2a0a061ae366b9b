"""The pytest plugin, in a pytest session of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from tests.support.paths import ROOT

_SESSION = """
import pytest, torch
from torch import nn


def train(watched, gain=1.0, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.SGD(model.parameters(), lr=1e-3)
    if watched is not None:
        watched(model, scaler, **options)
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(4, 8) * gain).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss


def test_healthy(watched):
    train(watched)


def test_broken(watched):
    train(watched, gain=1e6)


def test_fails_by_itself(watched):
    assert train(watched, gain=1e6).isfinite()


@pytest.mark.ampscope(min_headroom=200)
def test_limits(watched):
    train(watched)


def test_two_runs(watched):
    train(watched)
    train(watched, gain=1e6)


def test_not_watched():
    train(None, gain=1e6)


class TestOwnFixture:
    @pytest.fixture
    def watched(self):
        return ("of the suite's own",)

    def test_own_fixture(self, watched):
        assert watched == ("of the suite's own",)


def test_skips(watched):
    train(watched, gain=1e6)
    pytest.skip("for a reason")


@pytest.mark.ampscope
def test_without_the_fixture():
    train(None)


@pytest.mark.ampscope
def test_never_called(watched):
    train(None)


@pytest.mark.ampscope(most=1)
def test_unknown_limit(watched):
    train(watched)


@pytest.mark.ampscope(max_skipped=7)
def test_no_share(watched):
    train(watched)


@pytest.mark.ampscope(baseline="none")
def test_no_baseline(watched):
    train(watched)
"""


class Told(NamedTuple):
    """What a session says of one test."""

    outcome: str  #: passed, failure, error or skipped
    text: str


class Session(NamedTuple):
    tests: dict[str, Told]
    printed: str


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("session")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider -p no:xdist\n")
    (folder / "test_it.py").write_text(_SESSION)
    command = [sys.executable, "-m", "pytest", "--junitxml=told.xml", f"--basetemp={folder / 'runs'}"]
    found = subprocess.run(
        [*command, *([] if _is_installed() else ["-p", "ampscope.integrations.pytest_plugin"])],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert found.returncode == 1, found.stdout + found.stderr
    return Session(dict(map(_told, _cases(folder / "told.xml"))), found.stdout)


def _is_installed() -> bool:
    """Whether pytest loads the plugin by itself, as where ampscope was installed with it."""
    from importlib.metadata import entry_points

    return any(each.value == "ampscope.integrations.pytest_plugin" for each in entry_points(group="pytest11"))


def _cases(file: Path) -> list[ElementTree.Element]:
    return list(ElementTree.parse(file).iter("testcase"))


def _told(case: ElementTree.Element) -> tuple[str, Told]:
    for child in case:
        if child.tag in {"failure", "error", "skipped"}:
            return case.get("name", ""), Told(child.tag, child.text or "")
    return case.get("name", ""), Told("passed", "")


def test_a_healthy_training_passes(session: Session) -> None:
    assert session.tests["test_healthy"].outcome == "passed"


def test_a_broken_one_fails_with_its_diagnosis_and_nothing_else(session: Session) -> None:
    outcome, text = session.tests["test_broken"]
    assert outcome == "failure"
    assert text.startswith("FAILED  run-0")
    assert "PROBLEM  run-0" in text
    assert "Traceback" not in text


def test_a_test_that_fails_by_itself_keeps_its_failure_and_is_told_what_was_seen(session: Session) -> None:
    outcome, text = session.tests["test_fails_by_itself"]
    assert (outcome, "isfinite" in text) == ("failure", True)
    _, _, section = session.printed.partition("Captured ampscope call")
    assert "PROBLEM  run-0" in section


def test_limits_come_from_the_marker(session: Session) -> None:
    outcome, text = session.tests["test_limits"]
    assert outcome == "failure"
    assert "factors of two below overflow" in text
    assert "PROBLEM" not in text


def test_runs_of_one_test_are_judged_apart(session: Session) -> None:
    assert "PROBLEM  run-1" in session.tests["test_two_runs"].text


def test_what_was_not_asked_for_is_left_alone(session: Session) -> None:
    assert session.tests["test_not_watched"].outcome == "passed"
    assert session.tests["test_own_fixture"].outcome == "passed"
    assert session.tests["test_skips"].outcome == "skipped"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("test_without_the_fixture", "needs the fixture 'watched'"),
        ("test_never_called", "nothing was watched"),
        ("test_unknown_limit", "cannot be read: "),
        ("test_no_share", "write 1% or 0.01"),
        ("test_no_baseline", "AMPscope: "),
    ],
)
def test_a_test_that_could_not_fail_fails(session: Session, name: str, told: str) -> None:
    assert session.tests[name].outcome in {"failure", "error"}
    assert told in session.tests[name].text
