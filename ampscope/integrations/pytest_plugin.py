"""The pytest plugin: the fixture `watched`, and the marker that sets limits to what it watches.

@pytest.mark.ampscope(max_skipped="1%", min_headroom=2)
def test_it_learns(watched):
    watched(model, scaler)
    train(model, scaler)
"""

from __future__ import annotations

import io
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ampscope.errors import AmpscopeError

if TYPE_CHECKING:  # pytest loads this file in every session; only a test that watches loads the rest
    from rich.console import RenderableType

    from ampscope.analysis.diagnosis.gate import Gate
    from ampscope.analysis.diagnosis.gate_limits import Limits
    from ampscope.capture.scope import Scope

MARKER = "ampscope"
_FIXTURE = "watched"
_WIDTH = 100


class Watched:
    """Watches the trainings of one test; calling it is `ampscope.watch`, into a folder of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scopes: dict[Path, Scope] = {}  #: by the folder of the run

    def __call__(self, model: Any, scaler: Any = None, **options: Any) -> Scope:
        """Watches a model as `ampscope.watch` does; prints nothing, and records below the test's ``tmp_path``."""
        import ampscope

        folder = Path(options.pop("dir", self.folder / f"run-{len(self.scopes)}"))
        scope = ampscope.watch(model, scaler, dir=folder, **{"quiet": True, **options})
        self.scopes[folder] = scope
        return scope

    def close(self) -> list[Path]:
        """Ends all that is being watched; the folders of the runs."""
        for scope in self.scopes.values():
            scope.close()
        return list(self.scopes)


@pytest.fixture
def watched(tmp_path: Path) -> Generator[Watched]:
    """A function that watches a training as `ampscope.watch` does; the test fails if what it saw is not well."""
    watching = Watched(tmp_path / "ampscope")
    yield watching
    watching.close()


def pytest_configure(config: pytest.Config) -> None:
    """Makes the marker known."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(max_skipped=None, no_new_overflow=False, min_headroom=None, baseline=None, strict=False): "
        f"what trainings have to keep that the fixture `{_FIXTURE}` watches",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A marked test that watches nothing would never fail."""
    if item.get_closest_marker(MARKER) is not None and _FIXTURE not in getattr(item, "fixturenames", ()):
        pytest.fail(f"a test with the marker {MARKER!r} needs the fixture {_FIXTURE!r}, and calls it", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """After the test, what it watched is judged; a test that fails by itself is told what AMPscope saw."""
    watching = getattr(item, "funcargs", {}).get(_FIXTURE)
    if not isinstance(watching, Watched):  # not asked for, or a suite has a fixture of its own by this name
        return (yield)
    marker = item.get_closest_marker(MARKER)
    limits, baseline = _asked(marker)
    try:
        result = yield
    except Exception:
        _tell(item, watching)
        raise
    if marker is not None and not watching.scopes:
        pytest.fail(f"the test has not called its fixture {_FIXTURE!r}: nothing was watched", pytrace=False)
    for folder in watching.close():
        _judge(folder, limits, baseline)
    return result


def _asked(marker: pytest.Mark | None) -> tuple[Limits, Path | None]:
    """The limits that a marker sets, and the run to hold against."""
    from ampscope.analysis.diagnosis.gate_limits import Limits
    from ampscope.trace.location import location

    asked: dict[str, Any] = dict(marker.kwargs) if marker is not None else {}
    baseline = asked.pop("baseline", None)
    try:
        return Limits.asked(**asked), location(baseline) if baseline is not None else None
    except (AmpscopeError, TypeError) as error:
        pytest.fail(f"the marker {MARKER!r} cannot be read: {error}", pytrace=False)


def _judge(folder: Path, limits: Limits, baseline: Path | None) -> None:
    from ampscope.analysis.diagnosis.gate import Outcome

    try:
        found = _gate(folder, limits, baseline)
    except AmpscopeError as error:
        pytest.fail(f"AMPscope: {error}", pytrace=False)
    if found.outcome is not Outcome.PASSED:
        pytest.fail(_text(found), pytrace=False)


def _gate(folder: Path, limits: Limits, baseline: Path | None) -> Gate:
    from contextlib import ExitStack

    from ampscope.analysis.diagnosis.gate import gate
    from ampscope.trace.read.run import open_run

    with ExitStack() as opened:
        held = opened.enter_context(open_run(baseline)) if baseline is not None else None
        return gate(opened.enter_context(open_run(folder)), limits, held)


def _tell(item: pytest.Item, watching: Watched) -> None:
    """Adds to a test's failure what is wrong with its runs; its own exception stays what it fails with."""
    from ampscope.analysis.diagnosis.diagnosis import diagnose
    from ampscope.report.terminal.diagnosis_text import as_text
    from ampscope.trace.vocabulary import Verdict

    for folder in watching.close():
        try:
            diagnosis = diagnose(folder)
        except AmpscopeError as error:
            item.add_report_section("call", "ampscope", str(error))
        else:
            if diagnosis.verdict in {Verdict.PROBLEM, Verdict.AT_RISK}:
                item.add_report_section("call", "ampscope", _printed(as_text(diagnosis)))


def _text(found: Gate) -> str:
    from ampscope.analysis.diagnosis.gate import Limit, Outcome
    from ampscope.report.terminal.diagnosis_text import as_text as of_diagnosis
    from ampscope.report.terminal.verdict_text import gate_text as of_gate

    told = _printed(of_gate(found))
    verdict = next(check for check in found.checks if check.limit is Limit.VERDICT)
    return told if verdict.outcome is Outcome.PASSED else f"{told}\n\n{_printed(of_diagnosis(found.diagnosis))}"


def _printed(content: RenderableType) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=_WIDTH, highlight=False, markup=False, emoji=False, color_system=None)
    with console.capture() as captured:
        console.print(content, crop=False)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
