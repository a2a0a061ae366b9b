from __future__ import annotations

from pathlib import Path

import pytest

from ampscope import open_run
from ampscope.analysis.precision.precision import Precision, Share, WideReason, deepest, fold_modules, precision
from ampscope.analysis.tables.traced_steps import first_traced_steps, traced_steps
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Cast, Node, Source
from tests.support.trace_builder import TraceBuilder

HALF, FULL = ("float16",), ("float32",)


@pytest.fixture
def traced(run_folder: Path) -> Run:
    """A linear layer in fp16, a softmax that autocast widened, a sum the program widened, an int op and an input."""
    trace = TraceBuilder(run_folder)
    entry = trace.site(Node.INPUT, module="", in_dtypes=(), out_dtypes=HALF)
    mm = trace.site("aten.mm.default", module="blocks.0.fc")
    widen = trace.site("aten._to_copy.default", module="blocks.0.attn", cast=Cast.AUTOCAST, out_dtypes=FULL)
    softmax = trace.site("aten._softmax.default", module="blocks.0.attn", in_dtypes=FULL, out_dtypes=FULL)
    asked = trace.site("aten._to_copy.default", module="head", cast=Cast.EXPLICIT, out_dtypes=FULL)
    total = trace.site("aten.sum.default", module="head", in_dtypes=FULL, out_dtypes=FULL)
    argmax = trace.site("aten.add.Tensor", module="head", in_dtypes=("int64",), out_dtypes=("int64",))
    for site in (entry, mm, mm, widen, softmax, asked, total, argmax):
        trace.op(site, numel=10, step=4, source=Source.LIVE)
    trace.edge(3, 4, step=4, source=Source.LIVE)
    trace.edge(5, 6, step=4, source=Source.LIVE)
    trace.op(mm, step=4, source="replay:fp32")
    trace.op(mm, step=2)
    return open_run(trace.close())


def test_a_run_without_traced_ops_gives_an_empty_result(run_folder: Path) -> None:
    assert precision(open_run(TraceBuilder(run_folder).close())) == Precision()


def test_the_newest_live_step_comes_first(traced: Run) -> None:
    seen = precision(traced)
    assert (seen.step, seen.source) == (4, "live")
    assert [(one.step, one.source) for one in seen.traced] == [(4, "live"), (4, "replay:fp32"), (2, "replay")]
    assert precision(traced, step=2).source == "replay"
    assert precision(traced, step=99).step is None


def test_ops_are_counted_by_module_and_dtype_without_casts_inputs_and_integers(traced: Run) -> None:
    seen = precision(traced)
    assert seen.total.shares == (Share(dtype="float16", ops=2, bytes=40), Share(dtype="float32", ops=2, bytes=80))
    assert seen.total.part("float16") == 0.5
    assert seen.total.part("float16", by_bytes=True) == pytest.approx(1 / 3)
    assert seen.total.part("bfloat16") == 0.0
    assert {row.name: row.ops for row in seen.modules} == {"blocks.0.fc": 2, "blocks.0.attn": 1, "head": 1}
    assert {row.name for row in seen.ops} == {"aten.mm.default", "aten._softmax.default", "aten.sum.default"}


def test_casts_are_told_by_line_and_in_total(traced: Run) -> None:
    seen = precision(traced)
    assert [(row.kind, row.module, row.count, row.elements, row.bytes) for row in seen.casts] == [
        (Cast.AUTOCAST, "blocks.0.attn", 1, 10, 40),
        (Cast.EXPLICIT, "head", 1, 10, 40),
    ]
    assert [(row.kind, row.from_dtype, row.to_dtype) for row in seen.cast_totals] == [
        (Cast.AUTOCAST, "float16", "float32"),
        (Cast.EXPLICIT, "float16", "float32"),
    ]


def test_wide_ops_inside_autocast_say_why(traced: Run) -> None:
    islands = {island.op: island.reason for island in precision(traced).islands}
    assert islands == {"aten._softmax.default": WideReason.POLICY, "aten.sum.default": WideReason.REQUESTED}


@pytest.mark.parametrize(
    ("operands", "reason"),
    [(("float16", "float32"), WideReason.PROMOTED), (FULL, WideReason.OPERANDS), (HALF, WideReason.OWN)],
)
def test_wide_ops_without_a_cast_before_them_are_told_by_their_operands(
    run_folder: Path, operands: tuple[str, ...], reason: WideReason
) -> None:
    trace = TraceBuilder(run_folder)
    trace.op(trace.site("aten.mul.Tensor", in_dtypes=operands, out_dtypes=FULL))
    (island,) = precision(open_run(trace.close())).islands
    assert island.reason == reason


def test_modules_fold_into_their_ancestors(traced: Run) -> None:
    modules = precision(traced).modules
    assert deepest(modules, 3) == 3
    assert deepest(modules, 2) == 2
    folded = fold_modules(modules, 1)
    assert [(row.name, row.ops) for row in folded] == [("blocks", 3), ("head", 1)]
    assert deepest((), 5) == 1


@pytest.mark.parametrize("flagged", [True, False], ids=["told by the steps", "found among the ops"])
def test_the_first_traced_steps_are_the_oldest_of_all(run_folder: Path, flagged: bool) -> None:
    trace = TraceBuilder(run_folder)
    site = trace.site()
    for step in range(8):
        trace.step(step=step, traced="live" if flagged and step % 2 == 0 else "")
        if step % 2 == 0:
            trace.op(site, step=step, source="live")
    trace.op(site, step=2, source="replay")
    with open_run(trace.close()) as run:
        first = first_traced_steps(run, rank=0, count=3)
        assert [(one.step, one.source) for one in first] == [(0, "live"), (2, "replay"), (2, "live")]
        assert first == traced_steps(run)[::-1][:3]
        assert len(first_traced_steps(run, rank=0, count=9)) == 5
