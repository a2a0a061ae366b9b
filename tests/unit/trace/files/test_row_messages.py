"""A message that is packed is, byte for byte, the one that Arrow would have written."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from ampscope.trace.files.journal import RowMessages, to_batch
from ampscope.trace.schema import EventKind, EventRow, Row, ScalerAction, ScalerEventRow, StepRow, Table, arrow_schema
from ampscope.trace.write.writing_threads import AT_ONCE


def step(**columns: Any) -> StepRow:
    row = StepRow(7, 1, 0, 1.7e9, 0.5, 1024.0, 3, False, False, 2.5, 1e-3, 2, 0.25, 0.0625, "")
    return row._replace(**columns)


def scaler_event(**columns: Any) -> ScalerEventRow:
    row = ScalerEventRow(
        7, 0, 1.7e9, 0, None, ScalerAction.UNSCALE, None, None, None, "{}", "train.py", 12, "main", "s.unscale_(o)"
    )
    return row._replace(**columns)


ROWS: list[tuple[Table, Row]] = [
    (Table.STEPS, step()),
    (Table.STEPS, step(traced="live")),
    (Table.STEPS, step(traced="live:0")),
    (Table.STEPS, step(loss=float("nan"), grad_norm=float("inf"), skipped=True, found_inf=True)),
    (Table.STEPS, step(scale=None, growth_tracker=None, found_inf=None)),
    (Table.STEPS, step(loss=None, scale=None, growth_tracker=None, found_inf=None, grad_norm=None, lr=None)),
    (Table.STEPS, step(step=-(2**63), micro_batches=-1, averaged=4)),
    (Table.STEPS, step(lrs='{"0": 1.0000000000000000e-03, "1": 2.0000000000000000e-03}')),
    (Table.SCALER_EVENTS, scaler_event()),
    (Table.SCALER_EVENTS, scaler_event(optimizer=1, scale_before=4.0, scale_after=2.0, growth_tracker=0)),
    (Table.SCALER_EVENTS, scaler_event(code="größer 日本", file="", function="12345678")),
    (Table.EVENTS, EventRow(0, 0, 1.0, EventKind.WARNING, "text")),
]


def arrows(table: Table, row: Row) -> bytes:
    whole: bytes = to_batch(table, [row]).serialize().to_pybytes()
    return whole


@pytest.mark.parametrize(("table", "row"), ROWS)
def test_it_is_arrows(table: Table, row: Row) -> None:
    messages = RowMessages(table)
    messages.message(row)
    again = messages.message(row)
    assert type(again) is bytes, "it was packed"
    assert again == arrows(table, row)


def test_rows_of_all_kinds_in_turn() -> None:
    messages = RowMessages(Table.STEPS)
    rows = [row for table, row in ROWS if table is Table.STEPS]
    for one, other in itertools.product(rows, rows):
        for row in (one, other):
            assert bytes(messages.message(row)) == arrows(Table.STEPS, row)


def test_of_ever_new_kinds_a_few_are_kept() -> None:
    messages = RowMessages(Table.STEPS)
    for length in range(300):
        row = step(traced="x" * length)
        assert bytes(messages.message(row)) == arrows(Table.STEPS, row)
    assert len(messages._frames) <= 64


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({"step": 0.5}, TypeError),
        ({"step": None}, ValueError),
        ({"micro_batches": 1 << 15}, OverflowError),
        ({"traced": 5}, TypeError),
        ({"traced": "\ud800"}, ValueError),
        ({"loss": "low"}, TypeError),
    ],
)
def test_a_misfit_is_told_as_arrow_does(columns: dict[str, Any], error: type[Exception]) -> None:
    messages = RowMessages(Table.STEPS)
    for _ in range(2):
        messages.message(step())
        with pytest.raises(error):
            messages.message(step(**columns))


def test_what_a_float_cannot_hold_is_as_arrow_has_it() -> None:
    messages = RowMessages(Table.STEPS)
    messages.message(step())
    huge = step(duration_s=1e300)
    assert bytes(messages.message(huge)) == arrows(Table.STEPS, huge)


def test_every_table_that_is_written_at_once_can_be_packed() -> None:
    for table in AT_ONCE:
        assert len(RowMessages(table)._types) == len(arrow_schema(table))
