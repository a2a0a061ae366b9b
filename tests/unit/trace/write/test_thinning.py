"""Long runs in small budgets: parts are merged and old rows thinned, and no count, skip or scale is another."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ampscope.analysis.overview.overview import overview
from ampscope.analysis.scale.scale_history import scale_history
from ampscope.report.html.cards import thinned_note
from ampscope.trace.files.journal import to_batch
from ampscope.trace.files.layout import Span, list_table, span_of, span_path, table_folder
from ampscope.trace.manifest import Manifest
from ampscope.trace.read.run import Run, open_run
from ampscope.trace.read.table_scan import Scan
from ampscope.trace.schema import ScalerEventRow, StepRow, Table
from ampscope.trace.write import sealing
from ampscope.trace.write.disk_budget import record_share, thin_oldest
from ampscope.trace.write.resume import resume_point
from ampscope.trace.write.sealing import FAN_IN, Leftovers, merge, sweep
from ampscope.trace.write.thinning import WINDOWS, thinned
from ampscope.trace.write.writer import TraceWriter
from ampscope.trace.write.writing_threads import SealAt


def step(number: int) -> StepRow:
    """A step of a run whose scale grows each 500 steps, and falls again with a skipped step."""
    chance = random.Random(number)
    skipped = number % 500 == 499
    loss = float("nan") if number % 1500 == 1499 else 2.0 + chance.random()
    norm = float("inf") if skipped else 1.0 + chance.random()
    scale, time = 2.0 ** (16 + (number // 250) % 2), 1.7e9 + number + chance.random() / 2
    return StepRow(
        number,
        0,
        0,
        time,
        loss,
        scale,
        number % 500,
        skipped,
        skipped,
        norm,
        1 / (number + 1),
        1,
        chance.random(),
        0.1,
        "",
        lrs=f'{{"0": {1 / (number + 1)!r}, "1": 1.0}}' if number % 2 else None,
    )


def unscale(number: int) -> ScalerEventRow:
    action = "growth" if number % 500 == 250 else "unscale"
    return ScalerEventRow(
        number,
        0,
        1.7e9 + number + random.Random(number).random() / 2,
        0,
        0,
        action,
        None,
        2.0,
        None,
        "{}",
        "a.py",
        3,
        "f",
        "",
    )


def table_of(count: int) -> pa.Table:
    return pa.Table.from_batches([to_batch(Table.STEPS, [step(number) for number in range(count)])])


def column(rows: pa.Table, name: str) -> list[object]:
    values: list[object] = rows[name].to_pylist()
    return values


def sums(rows: pa.Table, name: str) -> float:
    return float(np.sum(np.array(rows[name].to_pylist(), dtype=np.float64)))


@pytest.mark.parametrize("level", [1, 2, 3])
def test_thinned_steps_keep_every_count_and_scale(level: int) -> None:
    before = table_of(6000)
    after = thinned(Table.STEPS, before, level)
    for name in ("step", "scale", "growth_tracker", "skipped", "found_inf", "segment", "micro_batches", "traced"):
        assert column(after, name) == column(before, name)
    assert sums(after, "duration_s") == pytest.approx(sums(before, "duration_s"), rel=1e-6)
    times = column(after, "time")
    assert times == sorted(times, key=float)  # type: ignore[arg-type]
    assert after.schema == before.schema


@pytest.mark.parametrize("level", [1, 2, 3])
def test_the_extremes_of_every_window_and_all_that_is_not_finite_stay(level: int) -> None:
    before = table_of(6000)
    after = thinned(Table.STEPS, before, level)
    for name in ("loss", "grad_norm"):
        was, now = (np.array(column(rows, name), dtype=float) for rows in (before, after))
        known = np.array([value is not None for value in column(after, name)])
        np.testing.assert_array_equal(was[known], now[known])  # nothing is made up
        assert known[~np.isfinite(was)].all()
        for first in range(0, 6000, WINDOWS[level - 1]):
            window = slice(first, first + WINDOWS[level - 1])
            good = was[window][np.isfinite(was[window])]
            kept = now[window][known[window] & np.isfinite(was[window])]
            assert (good.min(), good.max()) == (kept.min(), kept.max())
    left = np.array([value is not None for value in column(after, "averaged")])
    assert left.mean() > (0.5, 0.7, 0.7)[level - 1]
    assert (np.array(column(after, "averaged"), dtype=float)[left] > 0).all()


def test_the_rates_of_groups_stay_and_go_with_that_of_the_first() -> None:
    before = table_of(6000)
    after = thinned(Table.STEPS, before, 1)
    kept = [value is not None for value in column(after, "lr")]
    whole = column(before, "lrs")
    assert column(after, "lrs") == [own if keep else None for own, keep in zip(whole, kept, strict=True)]
    assert 0 < sum(kept) < len(kept)


def test_thinning_twice_is_thinning_to_the_second_level_at_most() -> None:
    once = thinned(Table.STEPS, table_of(6000), 1)
    twice = thinned(Table.STEPS, once, 2)
    assert twice["loss"].null_count > once["loss"].null_count
    assert sums(twice, "duration_s") == pytest.approx(sums(once, "duration_s"), rel=1e-6)


def record(folder: Path, count: int, *, budget: int = 1 << 20, close: bool = True) -> TraceWriter:
    """A run in many small parts."""
    writer = TraceWriter(folder, manifest=Manifest(), disk_budget=budget, seal_at=SealAt(rows=500))
    for first in range(0, count, 500):
        numbers = range(first, first + 500)
        writer.put(Table.STEPS, [step(number) for number in numbers])
        writer.put(Table.SCALER_EVENTS, [unscale(number) for number in numbers])
        writer.flush()
    if close:
        writer.close()
    return writer


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("rank=0/*/*"))


def told(run: Run) -> tuple[object, ...]:
    """What is said of a run, whatever has been thinned in it."""
    seen, scale = overview(run), scale_history(run)
    calls = [(call.action, call.count, call.first_step, call.last_step) for call in scale.calls]
    counts = (
        seen.steps,
        seen.first_step,
        seen.last_step,
        seen.skipped,
        seen.scale,
        seen.skips,
        seen.loss.nonfinite_count,
    )
    return (*counts, scale.log2_scale, scale.growth_tracker, scale.moves, scale.health, calls, len(scale.events))


def test_a_budget_is_one_at_any_length_and_no_figure_changes(tmp_path: Path) -> None:
    record(tmp_path / "whole", 12_000, budget=1 << 40)
    writer = record(tmp_path / "small", 12_000, budget=300 << 10)
    assert writer.failure is None
    assert size(tmp_path / "small") < size(tmp_path / "whole") / 2
    assert size(tmp_path / "small") < 300 << 10
    with open_run(tmp_path / "whole") as whole, open_run(tmp_path / "small") as small:
        assert told(small) == told(whole)
        seen, all_of_it = overview(small), overview(whole)
        assert seen.step_seconds == pytest.approx(all_of_it.step_seconds)
        assert seen.observing_share == pytest.approx(all_of_it.observing_share)
        assert (min(seen.loss.values), max(seen.loss.values)) == (
            min(all_of_it.loss.values),
            max(all_of_it.loss.values),
        )
        assert all_of_it.thinned == 0
        assert thinned_note(all_of_it) == ""
        assert seen.thinned > 6_000
        assert f"{seen.thinned:,}" in thinned_note(seen)
    assert resume_point(tmp_path / "small").next_step == {0: 12_000}


def test_a_run_with_room_is_merged_and_not_thinned(tmp_path: Path) -> None:
    record(tmp_path, 12_000, budget=1 << 40)
    listing = list_table(table_folder(tmp_path, 0, Table.STEPS))
    assert len(listing.parts) < 3 * FAN_IN
    assert listing.superseded == ()
    assert {span_of(part).level for part in listing.parts.values()} == {0}
    assert listing.next_number == 24


def steps_in(folder: Path) -> list[int]:
    with open_run(folder) as run:
        return [row.step for row in run.rows(Table.STEPS)]


def _parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A closed run of eight parts that have not been merged."""
    with monkeypatch.context() as patch:
        patch.setattr("ampscope.trace.write.writing_threads.merge", lambda *_, **__: None)
        record(tmp_path, 500 * FAN_IN, budget=1 << 40)
    return table_folder(tmp_path, 0, Table.STEPS)


def test_whatever_instant_a_merge_ends_at_the_rows_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _parts(tmp_path, monkeypatch)
    expected = steps_in(tmp_path)
    before = sorted(folder.iterdir())
    assert len(before) == FAN_IN

    def dies(path: Path, write: Callable[[Path], None]) -> None:
        write(path.with_name(path.name + ".tmp"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sealing, "write_whole", dies)
        merge(folder, Table.STEPS)
    assert steps_in(tmp_path) == expected
    assert merge(folder, Table.STEPS) is not None
    assert len(list_table(folder).superseded) == FAN_IN
    assert steps_in(tmp_path) == expected
    for part in before[:3]:  # killed while it deletes them
        part.unlink()
    assert steps_in(tmp_path) == expected
    assert sweep(folder) == []
    assert [path.name for path in folder.iterdir()] == ["part-000000-000007.parquet"]
    assert steps_in(tmp_path) == expected
    assert resume_point(tmp_path).next_step == {0: 500 * FAN_IN}


def test_what_is_merged_while_a_reader_looks_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _parts(tmp_path, monkeypatch)
    looks: list[int] = []
    real = list_table

    def merged_in_between(where: Path) -> object:
        listing = real(where)
        if where == folder and not looks:
            looks.append(1)
            merge(folder, Table.STEPS)
            leftovers = Leftovers()
            leftovers.look(folder)
            leftovers.clear(age=0.0)
        return listing

    monkeypatch.setattr("ampscope.trace.read.table_folders.list_table", merged_in_between)
    assert Scan(tmp_path).count(Table.STEPS, 0) == 500 * FAN_IN
    assert looks == [1]
    assert steps_in(tmp_path) == list(range(500 * FAN_IN))


def test_parts_are_kept_for_those_who_have_listed_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _parts(tmp_path, monkeypatch)
    merge(folder, Table.STEPS)
    leftovers = Leftovers()
    leftovers.look(folder)
    leftovers.clear()
    assert len(list_table(folder).superseded) == FAN_IN
    leftovers.clear(age=0.0)
    assert list_table(folder).superseded == ()


@pytest.mark.parametrize("stranger", ["damaged", "gone", "newer"])
def test_what_is_not_ours_to_read_is_not_merged_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stranger: str
) -> None:
    folder = _parts(tmp_path, monkeypatch)
    part = span_path(folder, Span(3, 3))
    if stranger == "gone":
        part.unlink()
    elif stranger == "damaged":
        part.write_bytes(b"PAR1")
    else:
        pq.write_table(pa.table({"step": [1], "new": [2]}), part)
    assert merge(folder, Table.STEPS) is None
    assert thin_oldest(tmp_path, 0, 0)
    assert list_table(folder).superseded


def test_names_tell_what_a_part_holds(tmp_path: Path) -> None:
    for name in (
        "part-000000.parquet",
        "part-000000.thinned-1.parquet",
        "part-000001.parquet",
        "part-000002-000005.parquet",
        "part-000003.parquet",
        "part-000009-000008.parquet",
        "journal-000004.arrow",
        "journal-000006.arrow",
    ):
        (tmp_path / name).touch()
    listing = list_table(tmp_path)
    names = [part.name for part in listing.parts.values()]
    assert names == ["part-000000.thinned-1.parquet", "part-000001.parquet", "part-000002-000005.parquet"]
    assert sorted(part.name for part in listing.superseded) == ["part-000000.parquet", "part-000003.parquet"]
    assert [journal.name for journal in listing.open_journals] == ["journal-000006.arrow"]
    assert [journal.name for journal in listing.sealed_journals] == ["journal-000004.arrow"]
    assert listing.next_number == 7
    with pytest.raises(ValueError, match="not a part"):
        span_of(tmp_path / "journal-000004.arrow")


def test_steps_have_a_share_of_the_budget() -> None:
    assert record_share(1 << 20) == 1 << 19
    assert record_share(2 << 30) == 256 << 20
