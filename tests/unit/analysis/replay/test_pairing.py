from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from ampscope import open_run
from ampscope.analysis.replay.pairing import OpPairs, align, ascending, common_subsequence, pair_ops
from ampscope.analysis.replay.recording import Recording, recording
from ampscope.analysis.tables.traced_steps import traced_steps
from ampscope.trace.schema import Node
from tests.support.trace_builder import TraceBuilder


@pytest.fixture
def trace(tmp_path: Path) -> TraceBuilder:
    return TraceBuilder(tmp_path / "run")


def recorded(trace: TraceBuilder) -> tuple[Recording, Recording]:
    """The first two steps."""
    run = open_run(trace.leave_open())
    one, other = (next(each for each in traced_steps(run) if each.step == step) for step in (0, 1))
    return recording(run, one), recording(run, other)


def paired(trace: TraceBuilder) -> OpPairs:
    pairs = pair_ops(*recorded(trace))
    assert (pairs.mine >= 0).sum() == (pairs.theirs >= 0).sum()
    return pairs


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("", "", []),
        ("abc", "abc", [0, 1, 2]),
        ("abc", "axbc", [0, 2, 3]),
        ("axbc", "abc", [0, -1, 1, 2]),
        ("abc", "xyz", [-1, -1, -1]),
        ("aab", "aaab", [0, 1, 3]),
        ("abcd", "abed", [0, 1, -1, 3]),
    ],
)
def test_sequences_are_lined_up(one: str, other: str, expected: list[int]) -> None:
    assert align(np.array([*map(ord, one)], np.int64), np.array([*map(ord, other)], np.int64)).tolist() == expected


def test_long_sequences_with_changes_all_over_are_lined_up_in_no_time() -> None:
    one = np.random.default_rng(0).integers(0, 50, 60_000)  # no element occurs once
    kept = np.arange(60_000) % 97 != 50
    began = time.perf_counter()
    found = align(one, one[kept])
    assert time.perf_counter() - began < 5
    where = np.full(60_000, -1)
    where[kept] = np.arange(kept.sum())
    assert (found == where).mean() > 0.95


def test_pairs_are_kept_that_go_up() -> None:
    assert ascending([(0, 5), (1, 1), (2, 2), (3, 0), (4, 3)]) == [(1, 1), (2, 2), (4, 3)]
    assert common_subsequence([1, 2, 3], [2, 3, 1]) == [(1, 0), (2, 1)]


def layer(trace: TraceBuilder, step: int, name: str, *, weight: int, kind: str = "Linear", op: str = "mm") -> None:
    where = {"step": step, "source": "live"}
    parameter = trace.site(Node.PARAMETER, name=f"{name}.weight", module=name, module_type="", in_dtypes=())
    read = trace.op(parameter, checksum=weight, **where)
    ran = trace.op(trace.site(f"aten.{op}.default", module=name, module_type=kind), **where)
    trace.edge(read, ran, **where)


def test_the_same_weights_are_the_same_layer_whatever_it_is_called(trace: TraceBuilder) -> None:
    for number in range(4):
        layer(trace, 0, f"layers.{number}.fc", weight=10 + number)
    for number, weight in enumerate((10, 11, 99, 12, 13)):
        layer(trace, 1, f"layers.{number}.fc", weight=weight)
    pairs = paired(trace)
    assert pairs.modules.only_other == ("layers.2.fc",)
    assert pairs.modules.renamed == (("layers.2.fc", "layers.3.fc"), ("layers.3.fc", "layers.4.fc"))
    assert pairs.theirs.tolist() == [0, 1, 2, 3, 6, 7, 8, 9]


def test_layers_with_other_weights_keep_their_names(trace: TraceBuilder) -> None:
    for step in range(2):
        for number in range(3):
            layer(trace, step, f"layers.{number}.fc", weight=10 * step + number)
    pairs = paired(trace)
    assert pairs.modules.renamed == ()
    assert pairs.theirs.tolist() == list(range(6))


def test_a_layer_between_two_others_is_known_by_what_it_does(trace: TraceBuilder) -> None:
    for number, op in enumerate(("mm", "relu", "mm")):
        layer(trace, 0, f"net.{number}", weight=number, op=op, kind=op)
    for number, op in enumerate(("mm", "norm", "relu", "mm")):
        layer(trace, 1, f"net.{number}", weight=10 + number, op=op, kind=op)
    pairs = paired(trace)
    assert pairs.modules.only_other == ("net.1",)
    assert dict(pairs.modules.theirs) == {"net.0": "net.0", "net.1": "net.2", "net.2": "net.3"}


def test_a_cast_that_one_step_lacks_leaves_the_rest_paired(trace: TraceBuilder) -> None:
    for step in range(2):
        where = {"step": step, "source": "live"}
        read = trace.op(trace.site(Node.INPUT, name="args[0]", module="fc"), **where)
        if step:
            cast = trace.op(trace.site("aten._to_copy.default", cast="autocast"), **where)
            trace.edge(read, cast, **where)
            read = cast
        trace.edge(read, trace.op(trace.site("aten.mm.default"), **where), **where)
    pairs = paired(trace)
    assert pairs.theirs.tolist() == [0, 2]
    assert pairs.mine.tolist() == [0, -1, 1]


def test_an_op_that_is_counted_to_another_module_is_the_same(trace: TraceBuilder) -> None:
    for step, module in enumerate(("fc", "head")):
        for name, where in (("mm", "fc"), ("clone", module), ("relu", "head"), ("exp", "fc")):
            trace.op(trace.site(f"aten.{name}.default", module=where), step=step, source="live")
    assert paired(trace).theirs.tolist() == [0, 1, 2, 3]


def test_fifty_thousand_ops_take_about_a_second(trace: TraceBuilder) -> None:
    for step in range(2):
        sites = [trace.site(f"aten.op{number % 7}.default", module=f"m{number // 5}") for number in range(500)]
        for turn in range(50 + step):
            for site in sites:
                trace.op(site, step=step, source="live", micro_batch=turn)
    one, other = recorded(trace)
    began = time.perf_counter()
    pairs = pair_ops(one, other)
    assert time.perf_counter() - began < 5
    assert (pairs.theirs >= 0).all()
