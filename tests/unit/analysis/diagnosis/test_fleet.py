"""What is told of a fleet whose answers are known by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ampscope.analysis.diagnosis.diagnosis import diagnose
from ampscope.analysis.diagnosis.fleet import Diagnosed, fleet
from ampscope.analysis.diagnosis.fleet_results import Fleet, RunVerdict
from ampscope.trace.read.find import runs_below
from ampscope.trace.schema import MANIFEST
from ampscope.trace.vocabulary import Cause, Verdict
from tests.support.trace_builder import TraceBuilder
from tests.support.verdicts.fleet_builder import Trained, build


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    before = [Trained(day=day) for day in range(6)]
    after = [Trained(day=8 + day, host="node-2", torch="2.13.0", lost=3, misuse=True) for day in range(4)]
    others = [Trained(day=13, device="cpu", lost=1, ranks=2, world_size=4), Trained(day=13, collapses=True)]
    return build(tmp_path_factory.mktemp("fleet"), [*before, *after, *others])


@pytest.fixture(scope="module")
def found(path: Path) -> Fleet:
    return fleet(runs_below([path]))


def test_runs_are_found_at_any_depth_and_once(path: Path) -> None:
    runs = runs_below([path, path / "day 0"])
    assert len(runs) == len(set(runs)) == 12


def test_verdicts_are_those_of_the_diagnosis_of_each_run(path: Path, found: Fleet) -> None:
    assert found.runs == 12
    assert found.recorded == 5
    counted: dict[str, int] = {}
    for run in runs_below([path]):
        if any((run / "rank=0" / table).exists() for table in ("incidents", "findings")):
            verdict = diagnose(run).verdict.value
            counted[verdict] = counted.get(verdict, 0) + 1
    assert found.verdicts == {**counted, "not_diagnosed": 7}
    assert counted[Verdict.PROBLEM] >= 4


def test_causes_and_places_are_counted_by_run(found: Fleet) -> None:
    clip = next(each for each in found.causes if each.cause is Cause.MISUSE_CLIP_BEFORE_UNSCALE)
    assert (clip.runs, clip.count) == (4, 4)
    place = next(each for each in found.places if each.cause is Cause.MISUSE_CLIP_BEFORE_UNSCALE)
    assert (place.line, place.runs) == ("train.py:10", 4)


def test_hosts_and_versions_with_the_most_problems_come_first(found: Fleet) -> None:
    first = {kind: next(one for one in found.groups if one.kind == kind) for kind in ("host", "torch", "device")}
    assert (first["host"].name, first["host"].runs, first["host"].problems) == ("node-2", 4, 4)
    assert (first["torch"].name, first["torch"].lost_steps) == ("2.13.0", 12)
    assert sum(each.runs for each in found.groups if each.kind == "host") == 12


def test_what_skipped_steps_cost_is_said_in_hours_of_all_ranks(found: Fleet) -> None:
    lost = found.lost
    assert (lost.steps, lost.calibrating, lost.lost) == (13 * 40, 13 * 2, 4 * 3 + 2)
    assert lost.skipped == lost.calibrating + lost.lost
    assert math.isclose(lost.gpu_hours, 12 * 36 / 3600)
    assert math.isclose(lost.device_hours - lost.gpu_hours, 4 * 36 / 3600)  # two of four ranks stand for all


def test_a_scale_that_ended_below_one_is_named(found: Fleet) -> None:
    assert found.collapsed_runs == 1
    (fallen,) = found.collapses
    assert (Path(fallen.run).name, fallen.step, fallen.scale, fallen.highest) == ("run-11", 39, 2.0**-3, 1024.0)


def test_what_changed_since_the_week_before_comes_with_how_far_it_is_from_chance(found: Fleet) -> None:
    assert found.window is not None
    assert (found.window.runs, found.window.runs_before) == (6, 6)
    clip = next(each for each in found.window.changes if each.name == Cause.MISUSE_CLIP_BEFORE_UNSCALE)
    assert (clip.hit_before, clip.hit) == (0, 4)
    pooled = 4 / 12
    assert math.isclose(clip.deviations, (4 / 6) / math.sqrt(pooled * (1 - pooled) * (2 / 6)))


def test_a_run_that_cannot_be_read_is_named_and_the_rest_is_told(path: Path, tmp_path: Path) -> None:
    good = build(tmp_path / "good", [Trained(lost=1)])
    broken = TraceBuilder(tmp_path / "broken")
    broken.step()
    for part in (broken.close() / "rank=0" / "steps").glob("*.parquet"):
        part.write_bytes(b"PAR1 no parquet")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / MANIFEST).write_text("[]")
    found = fleet(runs_below([tmp_path]))
    assert [Path(each.path).name for each in found.unreadable] == ["broken", "foreign"]
    assert found.runs == 3
    assert found.lost.lost == 1
    assert good.exists()


def test_an_open_run_counts_with_what_is_in_its_journals(tmp_path: Path) -> None:
    builder = TraceBuilder(tmp_path / "open")
    for _ in range(30):
        builder.step(skipped=True)
    builder.leave_open()
    assert fleet(runs_below([tmp_path]), diagnosed=Diagnosed.NONE).lost.lost == 10
    builder.close()


def test_runs_of_writers_that_knew_other_columns_are_one_fleet(tmp_path: Path) -> None:
    (_, older) = runs_below([build(tmp_path, [Trained(lost=1), Trained(lost=2)])])
    (part,) = older.glob("rank=0/steps/*.parquet")
    pq.write_table(pq.read_table(part).drop_columns(["averaged", "growth_tracker"]), part)
    found = fleet(runs_below([tmp_path]), diagnosed=Diagnosed.NONE)
    assert (found.lost.steps, found.lost.lost, found.unreadable) == (80, 3, ())


def test_a_fleet_without_runs_is_empty() -> None:
    assert fleet([]) == Fleet(runs=0, ranks=0)


class Remembered(dict[Path, RunVerdict]):
    """A cache in memory."""

    def keep(self, run: Path, verdict: RunVerdict) -> None:
        self[run] = verdict


def test_what_is_known_is_not_diagnosed_again(path: Path, found: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Remembered()
    assert fleet(runs_below([path]), known=known) == found
    monkeypatch.setattr("ampscope.analysis.diagnosis.fleet.verdict_of", None)
    assert fleet(runs_below([path]), known=known) == found


def test_all_runs_are_diagnosed_if_that_is_asked_for(path: Path) -> None:
    assert sum(fleet(runs_below([path]), diagnosed=Diagnosed.ALL).verdicts.values()) == 12
    assert fleet(runs_below([path]), diagnosed=Diagnosed.NONE).verdicts == {"not_diagnosed": 12}
