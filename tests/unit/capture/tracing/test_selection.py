"""What is asked for by name is written, with the edges between it, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from ampscope.capture.tracing.selection import Filters, Selection
from ampscope.capture.tracing.sites import SiteKey, Sites
from ampscope.trace.files.arrow_arrays import ColumnBlock
from ampscope.trace.files.journal import to_batch
from ampscope.trace.schema import EdgeRow, Node, OpRow, Phase, Table


class Op(NamedTuple):
    op: str
    module: str = ""
    name: str = ""
    reads: tuple[int, ...] = ()


STEP = (
    Op(Node.INPUT, name="x"),
    Op(Node.PARAMETER, "net.0.proj", "net.0.proj.weight"),
    Op("aten.mm.default", "net.0.proj", reads=(0, 1)),
    Op("aten._softmax.default", "net.0", reads=(2,)),
    Op(Node.BUFFER, "net.1", "net.1.mask"),
    Op("aten.add.Tensor", "net.1", reads=(3, 4)),
    Op(Node.GRADIENT, "net.0.proj", "net.0.proj.weight", reads=(5,)),
    Op(Node.STATE_AFTER, "net.0.proj", "exp_avg of net.0.proj.weight"),
)
FIRST = 3


def traced(filters: Filters) -> tuple[Selection, list[OpRow], list[EdgeRow]]:
    sites = Sites(FIRST, str)
    for each in STEP:
        sites.number(SiteKey(each.op, each.module, Phase.FORWARD, name=each.name))
    selection = Selection(sites)
    selection.filters = filters
    ops = [OpRow(0, "live", seq, 0, FIRST + seq, 0, 4) for seq in range(len(STEP))]
    read = [(seq, arg, writer) for seq, each in enumerate(STEP) for arg, writer in enumerate(each.reads)]
    return (
        selection,
        ops,
        [EdgeRow(0, "live", seq, arg, writer, 0, False, False, None, None) for seq, arg, writer in read],
    )


def column_arrays(rows: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: np.array([getattr(row, name) for row in rows]) for name in names}


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        pytest.param(Filters(), range(8), id="everything"),
        pytest.param(Filters(modules=("net.0",)), [0, 1, 2, 3, 6, 7], id="a module and what is inside"),
        pytest.param(Filters(modules=("*.1",)), [4, 5], id="a pattern, with what enters there"),
        pytest.param(Filters(modules=("net.?.proj", "net.1")), [0, 1, 2, 4, 5, 6, 7], id="several"),
        pytest.param(Filters(ops=("mm",)), [0, 1, 2], id="an op by its name"),
        pytest.param(Filters(ops=("aten.add", "aten._softmax.default")), [3, 4, 5], id="by longer names"),
        pytest.param(Filters(modules=("net.0",), ops=("*softmax*",)), [1, 3, 6, 7], id="an op in a module"),
        pytest.param(Filters(modules=("net.1",), parameters=("*.weight",)), [1, 4, 5, 6, 7], id="parameters elsewhere"),
        pytest.param(Filters(parameters=("*.bias",)), [0, 1, 2, 3, 4, 5], id="no gradient that is not asked for"),
    ],
)
def test_what_is_asked_for_is_kept(filters: Filters, kept: list[int]) -> None:
    selection, ops, edges = traced(filters)
    rows, between = selection.rows(ops, edges)
    assert [row.seq for row in rows] == list(kept)
    assert between == [edge for edge in edges if {edge.seq, edge.from_seq} <= set(kept)]


def test_columns_are_chosen_as_rows_are() -> None:
    selection, ops, edges = traced(Filters(modules=("net.0",)))
    op_columns: dict[str, Any] = column_arrays(ops, ("seq", "out", "site", "micro_batch", "numel"))
    edge_columns: dict[str, Any] = column_arrays(edges, EdgeRow._fields[2:8])
    common: dict[str, Any] = {"step": 0, "source": "live"}
    blocks = selection.columns(
        ColumnBlock(len(ops), {**common, **op_columns}), ColumnBlock(len(edges), {**common, **edge_columns})
    )
    kept, between = selection.rows(ops, edges)
    assert blocks[0].to_batch(Table.OPS).equals(to_batch(Table.OPS, kept))
    assert blocks[1].to_batch(Table.EDGES).equals(to_batch(Table.EDGES, between))


def test_filters_may_change() -> None:
    selection, ops, edges = traced(Filters(ops=("mm",)))
    assert len(selection.rows(ops, edges)[0]) == 3
    assert not selection.keeps(FIRST + 3)
    selection.filters = Filters()
    assert selection.rows(ops, edges) == (ops, edges)
    assert selection.keeps(FIRST + 3)
