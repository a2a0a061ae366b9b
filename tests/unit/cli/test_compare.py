"""``ampscope compare``: what it prints, and the exit code a script goes by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ampscope.trace.schema import Node
from tests.support.command import Command
from tests.support.trace_builder import TraceBuilder


def a_run(
    folder: Path, *, steps: int = 2, peak: float = 4.0, loss: float = 2.0, rank: int = 0, **manifest: Any
) -> Path:
    """A run whose two steps read an input and multiply it."""
    trace = TraceBuilder(folder, rank=rank, **manifest)
    read = trace.site(Node.INPUT, name="args[0]", in_dtypes=(), in_shapes=())
    ran = trace.site("aten.mm.default")
    for step in range(2):
        trace.step(traced="live", loss=loss if step else 2.0)
        given = trace.op(read, step=step, source="live", checksum=7)
        trace.edge(given, trace.op(ran, step=step, source="live", max=peak), step=step, source="live")
    return trace.close()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return a_run(tmp_path / "base")


def test_two_runs_that_are_the_same_are_exit_code_0(ampscope: Command, base: Path, tmp_path: Path) -> None:
    answer = ampscope("compare", base, a_run(tmp_path / "again"))
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("IDENTICAL")


def test_two_runs_that_differ_are_exit_code_1(ampscope: Command, base: Path, tmp_path: Path) -> None:
    answer = ampscope("compare", base, a_run(tmp_path / "other", peak=8.0))
    assert (answer.code, answer.err) == (1, "")
    assert answer.out.startswith("DIFFERENT")
    assert "aten.mm.default in fc, step 0" in answer.out
    assert "train.py:10" in answer.out


def test_the_json_has_what_scripts_look_for(ampscope: Command, base: Path, tmp_path: Path) -> None:
    answer = ampscope("compare", base, a_run(tmp_path / "other", peak=8.0), "--json")
    assert answer.code == 1
    found = json.loads(answer.out)
    assert found["identical"] is False
    first = found["first_divergence"]
    assert (first["step"], first["op"], first["module"], first["error"]) == (0, "aten.mm.default", "fc", 0.5)
    assert first["source"]["file"] == "train.py"
    assert 0 < first["tolerance"] < first["error"]
    assert {"kind", "module", "text", "score"} <= found["differences"][0].keys()
    scores = [each["score"] for each in found["differences"]]
    assert scores == sorted(scores, reverse=True)


def test_a_tolerance_is_what_may_differ(ampscope: Command, base: Path, tmp_path: Path) -> None:
    other = a_run(tmp_path / "other", peak=8.0)
    assert ampscope("compare", base, other, "--tolerance", "0.6").code == 0
    assert ampscope("compare", base, other, "--tolerance", "0.4").code == 1
    assert ampscope("compare", base, a_run(tmp_path / "near", peak=4.001)).code == 0
    assert ampscope("compare", base, tmp_path / "near", "--tolerance", "0").code == 1


def test_curves_that_part_after_the_last_trace_are_different(ampscope: Command, base: Path, tmp_path: Path) -> None:
    answer = ampscope("compare", base, a_run(tmp_path / "other", loss=3.0), "--json")
    found = json.loads(answer.out)
    assert answer.code == 1
    assert (found["first_divergence"]["step"], found["first_divergence"]["op"]) == (1, "")
    assert "The loss parts at step 1: 2 in A, 3 in B." in found["differences"][0]["text"]


def test_curves_are_told_with_as_many_digits_as_show_that_they_differ(
    ampscope: Command, base: Path, tmp_path: Path
) -> None:
    answer = ampscope("compare", base, a_run(tmp_path / "other", loss=2.0003), "--tolerance", "1e-6")
    assert answer.code == 1
    assert "The loss parts at step 1: 2 in A, 2.0003 in B." in answer.out
    answer = ampscope("compare", a_run(tmp_path / "one", loss=2.0001), tmp_path / "other", "--tolerance", "1e-6")
    assert "The loss parts at step 1: 2.0001 in A, 2.0003 in B." in answer.out


def longer(folder: Path, *, more: int, **last: Any) -> Path:
    """The two steps of `a_run`, and some more without a trace; the last one as given."""
    trace = TraceBuilder(folder)
    read = trace.site(Node.INPUT, name="args[0]", in_dtypes=(), in_shapes=())
    ran = trace.site("aten.mm.default")
    for step in range(2 + more):
        trace.step(traced="live" if step < 2 else "", **(last if step == 1 + more else {}))
        if step < 2:
            given = trace.op(read, step=step, source="live", checksum=7)
            trace.edge(given, trace.op(ran, step=step, source="live", max=4.0), step=step, source="live")
    return trace.close()


def test_a_run_that_is_longer_is_not_identical(ampscope: Command, base: Path, tmp_path: Path) -> None:
    answer = ampscope("compare", base, longer(tmp_path / "longer", more=3), "--json")
    found = json.loads(answer.out)
    assert (answer.code, found["identical"], found["first_divergence"]) == (0, False, None)
    assert "The same in the 2 steps that both made" in found["summary"]
    assert [each["text"] for each in found["differences"]] == ["A made 2 steps, B 5."]


def test_a_run_that_breaks_later_is_different(ampscope: Command, base: Path, tmp_path: Path) -> None:
    broken = longer(tmp_path / "broken", more=3, loss=float("nan"), grad_norm=float("nan"))
    answer = ampscope("compare", base, broken, "--json")
    found = json.loads(answer.out)
    assert (answer.code, found["likeness"], found["identical"]) == (1, "different", False)
    assert found["first_divergence"] is None
    assert found["summary"] == "The same in the 2 steps that both made, but A is healthy, B has a problem."
    assert found["differences"][0]["text"].startswith("A is healthy, B has a problem: ")


def test_another_machine_alone_is_told_and_no_difference_of_the_numbers(
    ampscope: Command, base: Path, tmp_path: Path
) -> None:
    answer = ampscope("compare", base, a_run(tmp_path / "other", device="NVIDIA H200", versions={"torch": "2.13"}))
    assert answer.code == 0
    assert answer.out.startswith("IDENTICAL")
    assert "Device: cpu in A, NVIDIA H200 in B." in answer.out
    assert "Version of torch: not recorded in A, 2.13 in B." in answer.out
    assert "Setting" not in answer.out


def test_steps_and_ranks_are_named_behind_the_run(ampscope: Command, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", world_size=2)
    a_run(run, rank=1, world_size=2, peak=8.0)
    assert ampscope("compare", f"{run}@0", f"{run}@1").code == 0
    answer = ampscope("compare", f"{run}@1", f"{run}@1:1")
    assert answer.code == 1
    assert "step 1, rank 1" in answer.out
    assert ampscope("compare", run, f"{run}@:1").code == 1


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("{run}@9", "has no trace of step 9 on rank 0; traced are 0, 1"),
        ("{run}@:3", "has nothing of rank 3; it has 0"),
        ("{run}-gone", "does not exist"),
        ("{run}@x", "does not exist"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_exit_code_2(ampscope: Command, base: Path, named: str, words: str) -> None:
    answer = ampscope("compare", base, named.format(run=base))
    assert (answer.code, answer.out) == (2, "")
    assert words in answer.err
    assert answer.err.count("\n") == 1


def test_a_folder_with_an_at_in_its_name_is_a_folder(ampscope: Command, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run@3")
    assert ampscope("compare", run, run).code == 0
    assert ampscope("compare", f"{run}@1", run).code == 0


def test_runs_without_a_trace_are_compared_by_their_curves(ampscope: Command, tmp_path: Path) -> None:
    for name, loss in (("one", 2.0), ("same", 2.0), ("other", 2.5)):
        trace = TraceBuilder(tmp_path / name)
        trace.step(loss=loss)
        trace.close()
    assert ampscope("compare", tmp_path / "one", tmp_path / "same").code == 0
    answer = ampscope("compare", tmp_path / "one", tmp_path / "other")
    assert answer.code == 1
    assert "no trace that both have tells with which op" in answer.out
