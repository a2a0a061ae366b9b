"""The verbs that read: what they print, and the exit code a script goes by."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import ampscope.analysis.diagnosis.diagnosis
from ampscope import __version__
from ampscope.errors import RunDamaged
from ampscope.trace.schema import EventKind
from ampscope.trace.vocabulary import STEP_RECORD, SWITCHED_OFF
from tests.support.command import Command
from tests.support.trace_builder import TraceBuilder
from tests.support.verdicts.by_hand import BROKEN, HEALTHY, RUN
from tests.support.verdicts.growing import growing


def _diagnose(path: Path, **_: object) -> object:
    """Stands in for the diagnosis: a run's verdict is in its folder's name."""
    if path.name == "damaged":
        raise RunDamaged(f"{path / 'run.json'} cannot be read.\nRestore it from a backup.")
    diagnosis = BROKEN if path.name == "broken" else HEALTHY
    return replace(diagnosis, run=replace(RUN, path=str(path), name=path.name))


@pytest.fixture
def verdict_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ampscope.analysis.diagnosis.diagnosis, "diagnose", _diagnose)


@pytest.mark.usefixtures("verdict_by_name")
class TestDiagnose:
    def test_a_problem_is_exit_code_1(self, ampscope: Command) -> None:
        answer = ampscope("diagnose", "runs/broken")
        assert answer.code == 1
        assert answer.out.startswith("PROBLEM  broken")
        assert answer.err == ""

    def test_a_healthy_run_is_exit_code_0(self, ampscope: Command) -> None:
        answer = ampscope("diagnose", "runs/fine")
        assert (answer.code, answer.err) == (0, "")
        assert answer.out.startswith("HEALTHY  fine")

    def test_json_is_json_alone(self, ampscope: Command) -> None:
        answer = ampscope("diagnose", "runs/broken", "--json")
        assert answer.code == 1
        assert json.loads(answer.out)["run"]["name"] == "broken"

    def test_an_error_is_one_line_and_exit_code_2(self, ampscope: Command) -> None:
        answer = ampscope("diagnose", "runs/damaged")
        assert (answer.code, answer.out) == (2, "")
        assert answer.err == "ampscope: runs/damaged/run.json cannot be read. Restore it from a backup.\n"


class TestAtRisk:
    """A run in which nothing is wrong yet."""

    def test_a_risk_is_no_problem_unless_it_is_asked_for(self, ampscope: Command, run_folder: Path) -> None:
        run = growing(run_folder).close()
        answer = ampscope("diagnose", run)
        assert (answer.code, answer.err) == (0, "")
        assert answer.out.startswith("AT RISK  ")
        assert ampscope("diagnose", run, "--strict").code == 1
        told = json.loads(ampscope("diagnose", run, "--json").out)
        assert told["verdict"] == "at_risk"
        assert told["primary"]["forecast_low"] <= told["primary"]["forecast_step"] <= told["primary"]["forecast_high"]

    def test_strict_changes_nothing_for_a_healthy_run(self, ampscope: Command, run_folder: Path) -> None:
        trace = TraceBuilder(run_folder)
        trace.step()
        assert ampscope("diagnose", trace.close(), "--strict").code == 0


class TestNothingObserved:
    @pytest.fixture
    def empty(self, tmp_path: Path) -> Path:
        return TraceBuilder(tmp_path / "empty").close()

    def test_it_is_exit_code_2_and_says_what_to_do(self, ampscope: Command, empty: Path) -> None:
        answer = ampscope("diagnose", empty)
        assert (answer.code, answer.err) == (2, "")
        assert answer.out.startswith("NOT OBSERVED  ")
        assert "Call ampscope.watch" in answer.out

    def test_the_json_has_the_verdict(self, ampscope: Command, empty: Path) -> None:
        answer = ampscope("diagnose", empty, "--json")
        assert answer.code == 2
        assert json.loads(answer.out)["verdict"] == "not_observed"

    def test_the_report_has_it_too(self, ampscope: Command, empty: Path, tmp_path: Path) -> None:
        assert ampscope("report", empty, "-o", tmp_path / "report.html").code == 0
        assert "Nothing was observed" in (tmp_path / "report.html").read_text("utf-8")


class TestSwitchedOff:
    """A run whose steps look healthy as far as they were seen, and that was not seen to its end."""

    @pytest.fixture
    def one_eyed(self, tmp_path: Path) -> Path:
        trace = TraceBuilder(tmp_path / "runs" / "one-eyed")
        for _ in range(4):
            trace.step()
        trace.event(EventKind.WARNING, f"the op tracer {SWITCHED_OFF} after ValueError: no (tracer.py:3)", step=2)
        return trace.close()

    def test_no_view_calls_it_healthy(self, ampscope: Command, one_eyed: Path, tmp_path: Path) -> None:
        said, why = ampscope("diagnose", one_eyed), "At step 2 the op tracer switched itself off after ValueError: no"
        assert (said.code, said.err) == (2, "")
        assert said.out.startswith("PARTLY OBSERVED  one-eyed")
        assert why in " ".join(said.out.split())
        told = json.loads(ampscope("diagnose", one_eyed, "--json").out)
        assert (told["verdict"], told["unobserved"][0][: len(why)]) == ("partly_observed", why)
        assert told["checked"] == {"traced": 0, "gradients": 4, "state_looks": 3, "lost": 0}
        assert "partly observed" in ampscope("runs", one_eyed.parent).out
        assert why in ampscope("runs", one_eyed.parent).out
        assert ampscope("gate", one_eyed).code == 2
        assert ampscope("report", one_eyed, "-o", tmp_path / "report.html").code == 0
        assert why in (tmp_path / "report.html").read_text("utf-8")

    @pytest.fixture
    def blind(self, tmp_path: Path) -> Path:
        trace = TraceBuilder(tmp_path / "runs" / "blind")
        for _ in range(4):
            trace.step()
        trace.event(EventKind.WARNING, f"{STEP_RECORD} {SWITCHED_OFF} after ValueError: no (step.py:3)", step=4)
        return trace.close()

    def test_every_view_says_that_it_is_not_known(self, ampscope: Command, blind: Path, tmp_path: Path) -> None:
        said = ampscope("diagnose", blind)
        assert (said.code, said.err) == (2, "")
        assert said.out.startswith("NOT OBSERVED  blind")
        assert "from step 4 on" in " ".join(said.out.split())
        told = ampscope("diagnose", blind, "--json")
        assert (told.code, json.loads(told.out)["verdict"]) == (2, "not_observed")
        listed = ampscope("runs", blind.parent)
        assert "not observed" in listed.out
        assert ampscope("report", blind, "-o", tmp_path / "report.html").code == 0
        assert "Nothing is known of the run from step 4 on" in (tmp_path / "report.html").read_text("utf-8")


class TestWithoutARun:
    """A verb that reads one run takes the newest in ./ampscope_runs, else around the working directory."""

    @pytest.fixture
    def newest(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.chdir(tmp_path)
        for created, name in enumerate(["fine", "broken"], 1):
            TraceBuilder(tmp_path / "ampscope_runs" / name, created=float(created)).close()
        return "ampscope: no run named; the newest is ampscope_runs/broken\n"

    @pytest.mark.usefixtures("verdict_by_name")
    def test_diagnose(self, ampscope: Command, newest: str) -> None:
        answer = ampscope("diagnose", "--json")
        assert (answer.code, answer.err) == (1, newest)
        assert json.loads(answer.out)["run"]["name"] == "broken"

    def test_report(self, ampscope: Command, newest: str) -> None:
        answer = ampscope("report")
        assert (answer.code, answer.err) == (0, newest)
        assert "broken" in Path("report.html").read_text("utf-8")

    def test_repro(self, ampscope: Command, newest: str) -> None:
        answer = ampscope("repro")
        assert answer.code == 2
        assert answer.err.startswith(newest)
        assert "nothing to reproduce" in answer.err

    @pytest.mark.parametrize("shown", ["lightning_logs/version_0/ampscope", "./ampscope-1"])
    @pytest.mark.parametrize(
        "verb", ["audit", "diagnose", "fix", "gate", "perfetto", "plan", "ranges", "report", "repro", "scale"]
    )
    def test_a_run_of_a_callback(
        self, ampscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, shown: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        TraceBuilder(tmp_path / "output_dir" / "_ampscope", created=1.0).close()
        TraceBuilder(tmp_path / shown, created=2.0).close()
        assert ampscope(verb).err.startswith(f"ampscope: no run named; the newest is {shown}\n")

    def test_the_title_tells_it_from_other_runs_of_callbacks(self, ampscope: Command, tmp_path: Path) -> None:
        run = TraceBuilder(tmp_path / "version_0" / "ampscope").close()
        assert ampscope("diagnose", run).out.startswith("NOT OBSERVED  version_0/ampscope\n")

    def test_all_runs_of_callbacks(self, ampscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        TraceBuilder(tmp_path / "lightning_logs/version_0/ampscope").close()
        answer = ampscope("runs", "--quick")
        assert (answer.code, answer.err) == (0, "")
        assert "lightning_logs/version_0/ampscope" in answer.out

    @pytest.mark.parametrize("verb", ["diagnose", "report", "repro", "runs"])
    def test_none_there(self, ampscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
        monkeypatch.chdir(tmp_path)
        answer = ampscope(verb)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.startswith("ampscope: There is no run in ./ampscope_runs, nor up to three levels below")
        assert "callbacks print it" in answer.err
        assert answer.err.count("\n") == 1


class TestRuns:
    def test_one_of_which_nothing_was_seen_says_so(self, ampscope: Command, tmp_path: Path) -> None:
        TraceBuilder(tmp_path / "empty").close()
        answer = ampscope("runs", tmp_path)
        assert (answer.code, answer.err) == (0, "")
        assert "not observed" in answer.out
        assert "Nothing was observed" in answer.out

    @pytest.mark.usefixtures("verdict_by_name")
    def test_lists_all_of_them(self, ampscope: Command, tmp_path: Path) -> None:
        for created, name in enumerate(["broken", "fine", "damaged"], 1):
            TraceBuilder(tmp_path / name, created=float(created)).close()
        answer = ampscope("runs", tmp_path)
        assert (answer.code, answer.err) == (0, "")
        names = ("broken", "fine", "damaged")
        assert sorted(names, key=answer.out.index) == ["damaged", "fine", "broken"]
        assert "Restore it" in answer.out

    def test_quickly_tells_what_was_recorded(self, ampscope: Command, tmp_path: Path) -> None:
        for name, tags in (("one", ("nightly",)), ("other", ())):
            trace = TraceBuilder(tmp_path / name, tags=tags)
            trace.step(skipped=True)
            trace.incident()
            trace.close()
        answer = ampscope("runs", tmp_path, "--quick", "--search", "NIGHT")
        assert answer.code == 0
        assert "not examined" in answer.out
        assert "other" not in answer.out.replace("1 incident", "")

    def test_a_search_without_hits_says_so(self, ampscope: Command, tmp_path: Path) -> None:
        TraceBuilder(tmp_path / "one").close()
        answer = ampscope("runs", tmp_path, "--search", "nowhere")
        assert (answer.code, answer.err) == (0, "")
        assert answer.out == f"No run in {tmp_path} matches 'nowhere' (looked at 1 run).\n"

    def test_none_there(self, ampscope: Command, tmp_path: Path) -> None:
        answer = ampscope("runs", tmp_path)
        assert answer.code == 2
        assert answer.err.startswith(f"ampscope: There is no run in {tmp_path}; give the folder")

    def test_no_folder_there(self, ampscope: Command, tmp_path: Path) -> None:
        assert "There is no folder" in ampscope("runs", tmp_path / "gone").err


def test_a_real_run_is_read(ampscope: Command, run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for _ in range(5):
        trace.step()
    trace.close()
    answer = ampscope("diagnose", run_folder, "--json")
    assert answer.code == 0
    assert json.loads(answer.out)["run"]["steps"] == 5


def test_a_path_that_is_not_there(ampscope: Command, tmp_path: Path) -> None:
    answer = ampscope("diagnose", tmp_path / "gone")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("ampscope: ")
    assert answer.err.count("\n") == 1


def test_a_hostile_path_moves_no_cursor(ampscope: Command, tmp_path: Path) -> None:
    assert "\x1b" not in ampscope("diagnose", tmp_path / "x\x1b[2Jy").err


def test_no_arguments_show_help(ampscope: Command) -> None:
    answer = ampscope()
    assert "diagnose" in answer.out
    assert ampscope("--help").code == 0


def test_version(ampscope: Command) -> None:
    assert ampscope("--version").out == f"ampscope {__version__}\n"


def test_a_mistyped_verb(ampscope: Command) -> None:
    assert ampscope("diagnos").code == 2


def test_python_m_is_the_same() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "ampscope", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stdout == f"ampscope {__version__}\n"
