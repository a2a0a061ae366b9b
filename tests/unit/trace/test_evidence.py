"""The evidence of an incident comes back from its row as it was written, and damage leaves out what it has damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ampscope.trace.evidence import (
    BadTensor,
    CallLine,
    EarlierCall,
    EarlierCast,
    Evidence,
    FindingEvidence,
    LostUpdates,
    MadeBefore,
    ProgramLine,
    RaisedError,
    Reduction,
)
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import Table
from tests.support.trace_builder import TraceBuilder

WHOLE = Evidence(
    rows={"input 0": (1, 5)},
    reduction=Reduction(hook="fp16_compress_hook", ranks=2, overflows=True, largest=7e4),
    compiled=True,
    called_from=(
        CallLine(file="train.py", line=7, function="main", code="y = model(x)", autocast="float16", tensors=1),
    ),
    made_before={"args[0]": MadeBefore(step=2, calls=(EarlierCall(name="mul", dtype="float16", line=4),))},
    finite_at={"norm.running_mean": 3},
    state=(
        BadTensor(kind="weight", name="fc.weight", nan=2, finite_at=4),
        BadTensor(bad_at=5, source=ProgramLine(line=2)),
    ),
    still=(LostUpdates(name="mean", share=0.5),),
    held=(LostUpdates(kind="optimizer", off_by=float("inf")),),
    count=3,
    source=ProgramLine(),
    carried=("bank, written at step 3",),
    in_float32="finite",
    read=True,
    exception=RaisedError(error="ValueError", value=1e5, does_not_fit=True),
    ops=(4, 8),
    hidden=((4, 9),),
    gradients_apart=0.5,
    lost={"fc.weight": 0.25},
    distinct={12: (30, 2)},
    cast_before={12: EarlierCast(since=2, source=ProgramLine(file="train.py", line=1))},
)


def read_back(text: str, folder: Path) -> Evidence:
    """What a reader makes of a row that has this text."""
    trace = TraceBuilder(folder)
    trace.incident(evidence=text)
    (row,) = open_run(trace.close()).rows(Table.INCIDENTS)
    return Evidence.of(row)


def test_all_of_it_comes_back(tmp_path: Path) -> None:
    assert read_back(WHOLE.as_json(), tmp_path / "run") == WHOLE


def test_the_columns_belong_to_it(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "run")
    trace.incident(bad_params=("fc.weight",), over_budget=True)
    (row,) = open_run(trace.close()).rows(Table.INCIDENTS)
    assert Evidence.of(row) == Evidence(bad_params=("fc.weight",), over_budget=True)


def test_what_is_as_by_default_is_not_written() -> None:
    assert Evidence(over_budget=True, bad_params=("fc.weight",)).as_json() == "{}"  # both are columns
    assert json.loads(Evidence(source=ProgramLine(line=3)).as_json()) == {"source": {"line": 3}}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("{", Evidence()),
        ("[1, 2]", Evidence()),
        ('{"rows": 7, "compiled": 1, "count": "x", "lost": {"a": "b", "c": 1}}', Evidence(lost={"c": 1.0})),
        (
            '{"state": [3, {"name": "a", "nan": true, "finite_at": 2}]}',
            Evidence(state=(BadTensor(name="a", finite_at=2),)),
        ),
        ('{"hidden": [[1, 2], [3], [4, "x"]], "unheard_of": 1}', Evidence(hidden=((1, 2),))),
        (f'{{"lost": {{"a": {10**400}, "b": 0.5}}, "loss_apart": -{10**400}}}', Evidence(lost={"b": 0.5})),
        (f'{{"distinct": {{"{"9" * 5000}": [9, 2], "4": [9, 2]}}}}', Evidence(distinct={4: (9, 2)})),
        ('{"distinct": {"4": [9, 2], "x": [9, 2], "5": [9]}, "source": 4}', Evidence(distinct={4: (9, 2)})),
    ],
)
def test_damage_leaves_out_what_it_has_damaged(text: str, left: Evidence, tmp_path: Path) -> None:
    assert read_back(text, tmp_path / "run") == left


def test_the_evidence_of_a_finding_comes_back(tmp_path: Path) -> None:
    seen = FindingEvidence(framework="accelerate", parameters=("fc.weight",), count=4, learns=True, was=2.0**16)
    trace = TraceBuilder(tmp_path / "run")
    trace.finding("nothing_trains", evidence=seen.as_json())
    (row,) = open_run(trace.close()).rows(Table.FINDINGS)
    assert FindingEvidence.of_row(row) == seen
