"""The rows of a small table are the same, in the same order, as the database gives them."""

from __future__ import annotations

import gc
import math
import weakref
from pathlib import Path
from typing import Any

import duckdb
import pytest

from ampscope.trace.read import small_tables
from ampscope.trace.read.run import Run, open_run
from ampscope.trace.read.table_scan import Scan
from ampscope.trace.schema import EventKind, ScalerAction, Source, Table
from tests.support.trace_builder import START, TraceBuilder

QUESTIONS: list[tuple[Table, dict[str, Any]]] = [
    (Table.STEPS, {}),
    (Table.STEPS, {"step": 2}),
    (Table.STEPS, {"rank": 1}),
    (Table.STEPS, {"rank": 1, "step": 2, "optimizer": 0}),
    (Table.STEPS, {"rank": 7}),
    (Table.STEPS, {"skipped": True}),
    (Table.STEPS, {"loss": None}),
    (Table.STEPS, {"loss": math.nan}),
    (Table.STEPS, {"loss": math.inf, "rank": 0}),
    (Table.OPS, {}),
    (Table.OPS, {"step": 1, "source": Source.REPLAY, "rank": 0}),
    (Table.OPS, {"source": "live"}),
    (Table.OPS, {"max": 2.5}),
    (Table.OPS, {"exp_low": None}),
    (Table.SCALER_EVENTS, {"action": ScalerAction.BACKOFF, "rank": 0}),
    (Table.SCALER_EVENTS, {}),
    (Table.EVENTS, {"kind": EventKind.NOTE}),
    (Table.FINDINGS, {}),
    (Table.SITES, {"rank": 1}),
]


@pytest.fixture
def two_ranks(run_folder: Path) -> Path:
    """Rows out of order, in parts of two segments and on two ranks."""
    for rank in (1, 0):
        for segment in range(2):
            trace = TraceBuilder(run_folder, rank=rank, world_size=2)
            for step in (3, 1, 2):
                loss = {1: None, 2: math.nan, 3: math.inf}[step]
                trace.step(step=step + 3 * segment, loss=loss, skipped=step == 3, time=START - step)
                trace.scaler_event(step=step + 3 * segment, time=math.nan if step == 2 else START)
                trace.event(text="\u00fc" * step, step=step, time=START + segment)
            site = trace.site()
            for source in (Source.REPLAY, Source.LIVE):
                trace.op(site, step=1 + segment, source=source, max=2.5, exp_low=1, exp_counts=(1, 2))
                trace.op(site, step=1 + segment, source=source, max=math.nan)
            trace.close()
    return run_folder


def answers(folder: Path) -> list[str]:
    """What each question is answered; as text, for NaN equals nothing."""
    with open_run(folder) as run:
        return [f"{table} {equals} {run.rows(table, **equals)}" for table, equals in QUESTIONS]


def test_rows_are_those_of_the_database(two_ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = answers(two_ranks)
    for limit, most in (("MOST_AT_HAND", 5), ("_MOST_STRETCHES", 1), ("MOST_AT_HAND", 0), ("MOST_ROWS", 0)):
        monkeypatch.setattr(small_tables, limit, most)
        assert answers(two_ranks) == small
    assert len(set(small)) == len(QUESTIONS)


def test_a_step_of_more_rows_is_no_question_for_the_database(two_ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_tables, "MOST_AT_HAND", 5)
    with open_run(two_ranks) as run:
        rows = run.rows(Table.OPS, rank=0)
        monkeypatch.setattr(Run, "_relation", None)
        for source in (Source.REPLAY, Source.LIVE):
            found = run.rows(Table.OPS, step=2, source=source, rank=0)
            assert list(map(repr, found)) == [repr(row) for row in rows if (row.step, row.source) == (2, source)] != []
        assert run.rows(Table.OPS, step=9, source=Source.LIVE, rank=0) == []


@pytest.mark.parametrize("few", [0, 16], ids=["read by the database", "read one by one"])
def test_frames_are_those_of_the_database(two_ranks: Path, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(run: Run) -> list[Any]:
        stepless = (Table.PARAMS, Table.SITES)
        asked = [(table, step) for table in Table for step in (None, 1) if step is None or table not in stepless]
        frames = [run.table(table, step=step, rank=rank) for table, step in asked for rank in (None, 1)]
        found = [frame.collect() for frame in frames]
        return [(each.schema, sorted(map(repr, each.rows()))) for each in found]

    monkeypatch.setattr("ampscope.trace.read.table_scan._FEW_PARTS", few)
    with open_run(two_ranks) as run:
        small = told(run)
    monkeypatch.setattr(small_tables, "MOST_ROWS", 0)
    with open_run(two_ranks) as run:
        assert told(run) == small


def test_a_column_that_no_table_has_is_refused(two_ranks: Path) -> None:
    with open_run(two_ranks) as run, pytest.raises(duckdb.BinderException, match="colour"):
        run.rows(Table.STEPS, colour="red")


def test_what_was_read_is_the_readers_own(two_ranks: Path) -> None:
    with open_run(two_ranks) as run:
        rows = run.rows(Table.STEPS)
        rows.clear()
        assert len(run.rows(Table.STEPS)) == 12


def test_a_table_is_read_once_for_each_state(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Table] = []
    real = Scan.load

    def counted(self: Scan, connection: Any, table: Table, **options: Any) -> Any:
        loads.append(table)
        return real(self, connection, table, **options)

    monkeypatch.setattr(Scan, "load", counted)
    trace = TraceBuilder(run_folder)
    trace.step()
    with open_run(trace.leave_open()) as run:
        assert [len(run.rows(Table.STEPS, rank=0)) for _ in range(3)] == [1, 1, 1]
        run.table(Table.STEPS, rank=0)
        assert loads == [Table.STEPS]
        trace.step()
        trace.leave_open()
        assert len(run.rows(Table.STEPS, rank=0)) == 2
        assert loads == [Table.STEPS] * 2
    trace.close()


def test_what_is_kept_has_a_limit(two_ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_run(two_ranks) as run:
        kept = [len(run.rows(table)) for table in Table]
        sizes = [small.size for _, small in run._small._known.values() if small is not None]
        assert len(sizes) == len(Table)
        monkeypatch.setattr(small_tables, "MOST_KEPT", sum(sizes) // 2)
        run.rows(Table.STEPS, rank=0)
        left = [small.size for _, small in run._small._known.values() if small is not None]
        assert 0 < sum(left) <= sum(sizes) // 2
        assert [len(run.rows(table)) for table in Table] == kept


def test_what_is_let_go_of_is_held_by_no_query(two_ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_run(two_ranks) as run:
        assert len(run.steps.collect()) > 0
        (small,) = (weakref.ref(each) for _, each in run._small._known.values() if each is not None)
        rows = weakref.ref(small().arrow)  # type: ignore[union-attr]  # it is kept yet
        monkeypatch.setattr(small_tables, "MOST_KEPT", 0)
        run.rows(Table.STEPS, rank=0)
        gc.collect()
        assert rows() is None


def test_rows_as_objects_count(two_ranks: Path) -> None:
    with open_run(two_ranks) as run:
        count = len(run.rows(Table.STEPS))
        (small,) = (each for _, each in run._small._known.values() if each is not None)
        assert small.size > small.arrow.nbytes + 600 * count
