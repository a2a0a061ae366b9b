"""Traces of which a part is lost or broken still give an answer, as far as it goes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ampscope.analysis.diagnosis.diagnosis import diagnose
from ampscope.analysis.results import Diagnosis
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import Node, Phase, Source, Table
from ampscope.trace.vocabulary import Cause, Verdict
from tests.support.primary import primary_incident
from tests.support.trace_builder import TraceBuilder
from tests.support.traced_steps import INF


def overflowing(folder: Path, *, scalars: str = "{}", evidence: str = "{}") -> Path:
    """A run whose step 1 overflowed in a product, which its replay shows."""
    trace = TraceBuilder(folder)
    for step in range(3):
        trace.step(skipped=step == 1)
    where = {"step": 1, "source": Source.REPLAY}
    x = trace.op(trace.site(Node.INPUT, name="x", in_dtypes=(), in_shapes=()), min=-300.0, max=300.0, **where)
    product = trace.site("aten.mm.default", module="fc", phase=Phase.FORWARD, scalars=scalars)
    bad = trace.op(product, min=-1.0, max=INF, **where)
    loss = trace.op(trace.site(Node.LOSS), min=INF, max=INF, **where)
    trace.edge(x, bad, **where)
    trace.edge(bad, loss, **where)
    trace.incident(step=1, evidence=evidence)
    return trace.close()


def without(run: Path, table: Table) -> Diagnosis:
    for folder in run.glob(f"rank=*/{table}"):
        shutil.rmtree(folder)
    return diagnose(run)


def test_whole_it_names_the_op(run_folder: Path) -> None:
    primary = primary_incident(open_run(overflowing(run_folder)))
    assert (primary.cause, primary.op, primary.module) == (Cause.FP16_OVERFLOW, "aten.mm.default", "fc")


@pytest.mark.parametrize("table", [Table.OPS, Table.EDGES, Table.SITES])
def test_without_a_table_the_step_is_told_and_the_origin_is_not_known(run_folder: Path, table: Table) -> None:
    diagnosis = without(overflowing(run_folder), table)
    assert diagnosis.verdict is Verdict.PROBLEM
    assert diagnosis.primary is not None
    assert (diagnosis.primary.step, diagnosis.primary.cause) == (1, Cause.UNKNOWN)
    assert "not known" in diagnosis.summary


@pytest.mark.parametrize("broken", ["", "{", "[1]", "null"])
def test_columns_that_do_not_parse_say_nothing(run_folder: Path, broken: str) -> None:
    primary = primary_incident(open_run(overflowing(run_folder, scalars=broken, evidence=broken)))
    assert (primary.cause, primary.op) == (Cause.FP16_OVERFLOW, "aten.mm.default")
