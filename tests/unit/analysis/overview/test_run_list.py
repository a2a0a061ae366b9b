from __future__ import annotations

import math
from pathlib import Path

from ampscope.analysis.overview.run_list import run_summaries, run_summary
from tests.support.trace_builder import START, TraceBuilder


def test_a_run_is_summed_up_without_its_diagnosis(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "gpt", model="GPT", device="NVIDIA H200", tags=("nightly",))
    for step in range(10):
        trace.step(skipped=step < 2)
    trace.incident()
    trace.finding()
    seen = run_summary(trace.close())
    assert (seen.name, seen.model, seen.device, seen.tags) == ("gpt", "GPT", "NVIDIA H200", ("nightly",))
    assert (seen.steps, seen.skipped, seen.skipped_share) == (10, 2, 0.2)
    assert (seen.incidents, seen.findings, seen.status, seen.problem) == (1, 1, "closed", "")
    assert seen.last_time == START + 9
    assert seen.duration == 9


def test_an_open_run_is_summed_up_from_its_journals(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "open")
    trace.step()
    seen = run_summary(trace.leave_open())
    assert (seen.steps, seen.status) == (1, "open")
    trace.close()


def test_an_empty_run_has_nothing_to_tell(tmp_path: Path) -> None:
    seen = run_summary(TraceBuilder(tmp_path / "empty").close())
    assert (seen.steps, seen.duration, seen.skipped_share) == (0, None, None)


def test_one_that_cannot_be_read_says_why_and_the_others_are_told(tmp_path: Path) -> None:
    torn = TraceBuilder(tmp_path / "torn")
    torn.step()
    (part,) = torn.close().glob("rank=0/steps/*.parquet")
    part.write_bytes(part.read_bytes()[:200])
    broken = TraceBuilder(tmp_path / "broken").close()
    (broken / "run.json").write_text("{")
    fine = TraceBuilder(tmp_path / "fine").close()
    seen = run_summaries([part.parents[2], broken, fine])
    assert [one.name for one in seen] == ["torn", "broken", "fine"]
    assert "part-000000.parquet cannot be read" in seen[0].problem
    assert "run.json cannot be read" in seen[1].problem
    assert seen[2].problem == ""


def test_every_word_of_a_search_must_occur(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "gpt", model="GPT", tags=("nightly",))
    seen = run_summary(trace.close())
    assert seen.matches("gpt NIGHT")
    assert seen.matches("")
    assert not seen.matches("gpt weekly")


def test_a_small_picture_of_loss_and_scale_is_kept(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "long")
    for step in range(500):
        trace.step(loss=math.nan if step == 499 else 500.0 - step, scale=2.0 ** (step // 100))
    seen = run_summary(trace.close())
    assert len(seen.loss.steps) < 70
    assert (seen.loss.steps[0], seen.loss.values[0]) == (0, 500.0)
    assert seen.loss.nonfinite == (499,)
    assert (seen.scale.values[0], seen.scale.values[-1]) == (0.0, 4.0)
