from __future__ import annotations

from pathlib import Path

import pytest

from ampscope.analysis.overview.search import MOST, HitKind, Hits, search
from ampscope.trace.read.run import Run, open_run
from tests.support.scenes import overflow
from tests.support.trace_builder import TraceBuilder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four blocks of a transformer, step 260 replayed."""
    return open_run(overflow(tmp_path_factory.mktemp("search") / "run").close())


def by_kind(found: tuple[Hits, ...]) -> dict[HitKind, Hits]:
    return {each.kind: each for each in found}


def test_hits_are_grouped_and_counted(run: Run) -> None:
    found = by_kind(search(run, "softmax"))
    assert list(found) == [HitKind.MODULE, HitKind.LINE, HitKind.OP]
    assert [hit.text for hit in found[HitKind.MODULE].hits] == [f"blocks.{block}.attn" for block in range(4)]
    assert [hit.text for hit in found[HitKind.OP].hits] == ["aten._softmax.default"]
    (line,) = found[HitKind.LINE].hits
    assert (line.text, line.note) == ("/home/me/gpt/model.py:35", "att = scores.softmax(-1)")


def test_the_closest_comes_first_and_a_few_are_told(run: Run) -> None:
    modules = by_kind(search(run, "attn"))[HitKind.MODULE]
    assert modules.total == 8
    assert len(modules.hits) == MOST
    assert [hit.text for hit in modules.hits[:4]] == [f"blocks.{block}.attn" for block in range(4)]
    assert by_kind(search(run, "blocks.2.attn"))[HitKind.MODULE].hits[0].text == "blocks.2.attn"


def test_every_word_counts_whatever_its_case(run: Run) -> None:
    assert [hit.text for hit in by_kind(search(run, "ATTN  .3"))[HitKind.MODULE].hits] == [
        "blocks.3.attn",
        "blocks.3.attn.qkv",
    ]
    assert search(run, "attn nowhere") == ()
    assert search(run, "  ") == ()


def test_a_hit_says_where_its_first_op_ran(run: Run) -> None:
    hit = by_kind(search(run, "bmm"))[HitKind.OP].hits[0]
    assert (hit.step, hit.source, hit.seq) == (260, "replay", 2)


@pytest.mark.parametrize("asked", ["260", "step 260", "Step #260", " 2,60 "])
def test_a_number_is_a_step(run: Run, asked: str) -> None:
    (hit,) = by_kind(search(run, asked))[HitKind.STEP].hits
    assert (hit.text, hit.note, hit.step, hit.source) == ("260", "skipped, traced op by op", 260, "replay")
    assert HitKind.STEP not in by_kind(search(run, "99999"))


def test_what_ran_in_an_older_step_alone_is_found_there(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "run")
    old, new = trace.site("aten.old.default", module="a"), trace.site("aten.new.default", module="b")
    for step in range(3):
        trace.step(step=step, traced="live")
    trace.op(old, step=0, source="live")
    trace.op(old, step=1, source="live")
    trace.op(new, step=2, source="live")
    run = open_run(trace.close())
    assert by_kind(search(run, "old"))[HitKind.OP].hits[0].step == 1
    assert by_kind(search(run, "new"))[HitKind.OP].hits[0].step == 2


def test_a_run_without_traced_steps_has_no_ops(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "run")
    trace.step()
    run = open_run(trace.close())
    assert search(run, "bmm") == ()
    assert [each.kind for each in search(run, "0")] == [HitKind.STEP]
