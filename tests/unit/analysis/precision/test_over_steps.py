"""What traced steps ran in, one after the other, and when a module went over to another dtype."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampscope import open_run
from ampscope.analysis.precision import over_steps
from ampscope.analysis.precision.over_steps import DtypeChange, PrecisionOverSteps, precision_over_steps
from ampscope.report.figures.precision_bars import dtype_steps
from ampscope.report.precision_words import over_steps_in_words
from ampscope.trace.schema import Cast, Phase, Source
from tests.support.trace_builder import TraceBuilder

HALF, FULL = "float16", "float32"


class Steps:
    """Writes traced steps, each a dtype by module; a module may run several ops."""

    def __init__(self, folder: Path) -> None:
        self.trace = TraceBuilder(folder)
        self._sites: dict[tuple[str, str, str], int] = {}

    def site(self, module: str, op: str, dtype: str) -> int:
        key = module, op, dtype
        if key not in self._sites:
            dtypes = {"in_dtypes": (dtype,), "out_dtypes": (dtype,)}
            self._sites[key] = self.trace.site(f"aten.{op}.default", module=module, **dtypes)
        return self._sites[key]

    def step(self, step: int, dtypes: dict[str, str], *, op: str = "mm", source: str = Source.LIVE) -> None:
        self.trace.step(step=step, traced=source)
        for module, dtype in dtypes.items():
            self.trace.op(self.site(module, op, dtype), step=step, source=source)

    def seen(self) -> PrecisionOverSteps:
        with open_run(self.trace.close()) as run:
            return precision_over_steps(run)


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    return Steps(tmp_path / "run")


def calm(**others: str) -> dict[str, str]:
    return {"h.1.mlp": HALF, "h.2.mlp.fc": HALF, "h.2.mlp.proj": HALF, "norm": FULL, **others}


def wide() -> dict[str, str]:
    return {**calm(), "h.2.mlp.fc": FULL, "h.2.mlp.proj": FULL}


def test_the_share_of_each_dtype_in_each_step(steps: Steps) -> None:
    steps.step(0, calm())
    steps.step(8, wide())
    seen = steps.seen()
    assert seen.steps == (0, 8)
    assert seen.ops == {HALF: (3, 1), FULL: (1, 3)}
    half, full = dtype_steps(seen).layers
    assert (half.dtype, half.shares, full.shares) == (HALF, (0.75, 0.25), (0.25, 0.75))
    assert half.hovers == ("step 0: float16 75 %", "step 8: float16 25 %")


def test_a_module_that_goes_over_is_told_with_its_steps(steps: Steps) -> None:
    for step in (0, 20, 39, 40, 60):
        steps.step(step, wide() if step >= 40 else calm())
    seen = steps.seen()
    assert seen.changes == (DtypeChange(step=40, before=39, modules=("h.2.mlp",), was=HALF, now=FULL),)
    assert list(over_steps_in_words(seen)) == ["h.2.mlp ran in float32 from step 40 on, before in float16."]
    assert [mark.column for mark in dtype_steps(seen).marks] == [3]


def test_the_way_back_ends_it_and_steps_that_were_not_traced_are_no_evidence(steps: Steps) -> None:
    for step, dtypes in ((0, calm()), (16, wide()), (32, wide()), (48, calm())):
        steps.step(step, dtypes)
    there, back = over_steps_in_words(steps.seen())
    assert there == "h.2.mlp ran in float32 from step 16 until step 48, before (up to step 0) in float16."
    assert back == "h.2.mlp ran in float16 from step 48 on, before (up to step 32) in float32."


def test_one_op_of_a_module_is_told_as_that(steps: Steps) -> None:
    for step, dtype in ((0, HALF), (1, FULL)):
        steps.step(step, {"attn": HALF})
        steps.trace.op(steps.site("attn", "bmm", dtype), step=step, source=Source.LIVE)
    (change,) = steps.seen().changes
    assert (change.modules, change.op) == (("attn",), "aten.bmm.default")


def test_more_or_other_modules_are_no_change(steps: Steps) -> None:
    """Healthy steps may be written in part; a replay is whole."""
    steps.step(0, {"norm": FULL})
    steps.step(1, calm(), source=Source.REPLAY)
    steps.step(2, {"h.1.mlp": HALF})
    seen = steps.seen()
    assert (seen.changes, seen.sources) == ((), ("live", "replay", "live"))
    same = "In all 3 traced steps, 0 to 2, every module ran in the same dtypes."
    assert list(over_steps_in_words(seen)) == [same]


def test_a_step_that_was_only_audited_is_told_apart(steps: Steps) -> None:
    for step in range(3):
        steps.step(step, calm())
    steps.step(5, calm(), source=Source.AUDIT)
    seen = steps.seen()
    assert seen.steps == (0, 1, 2)
    assert list(over_steps_in_words(seen))[1:] == ["1 more step was replayed for an audit alone and not counted."]


def test_a_step_counts_once_and_as_it_ran(steps: Steps) -> None:
    steps.step(3, calm())
    for source in (Source.REPLAY, Source.REPLAY_FP32):
        for module in calm():
            steps.trace.op(steps.site(module, "mm", FULL), step=3, source=source)
    seen = steps.seen()
    assert (seen.steps, seen.sources, seen.ops[HALF]) == ((3,), ("live",), (3,))


def test_casts_and_whole_numbers_are_no_computation(steps: Steps) -> None:
    steps.step(0, {"a": HALF})
    cast = steps.trace.site("aten._to_copy.default", cast=Cast.AUTOCAST)
    index = steps.trace.site("aten.arange.default", in_dtypes=(), out_dtypes=("int64",), phase=Phase.FORWARD)
    for site in (cast, index):
        steps.trace.op(site, step=0, source=Source.LIVE)
    assert steps.seen().ops == {HALF: (1,)}


def test_other_optimizers_steps_are_others(steps: Steps) -> None:
    steps.step(0, {"a": HALF})
    steps.step(1, {"a": HALF})
    steps.trace.op(steps.site("a", "mm", FULL), step=1, source="live@1")
    with open_run(steps.trace.close()) as run:
        assert precision_over_steps(run).changes == ()
        assert precision_over_steps(run, optimizer=1).ops == {FULL: (1,)}


def test_of_very_many_kinds_of_steps_some_are_looked_at(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_steps, "MOST_KINDS", 3)
    for step in range(9):
        steps.step(step, {"a": HALF}, op=f"op{step}")
    seen = steps.seen()
    assert (seen.steps, seen.passed_over) == ((0, 4, 8), 6)
    assert "6 more traced steps ran yet other ops" in " ".join(over_steps_in_words(seen))


def test_nothing_traced_gives_nothing(steps: Steps) -> None:
    assert steps.seen() == PrecisionOverSteps()


def test_more_steps_than_columns_share_them() -> None:
    seen = PrecisionOverSteps(steps=tuple(range(1000)), sources=("live",) * 1000, ops={HALF: (1,) * 1000})
    drawn = dtype_steps(seen, chosen=999)
    assert len(drawn.steps) == 240
    assert (drawn.chosen, drawn.chosen_words) == (239, "step 999")
    assert drawn.layers[0].hovers[0] == "steps 0 to 3: float16 100 %"
