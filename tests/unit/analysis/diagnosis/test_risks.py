"""Warnings before the fact, from traces written by hand: each with a twin that stays quiet."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ampscope
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.trace.schema import Node, Phase, ReplayStatus, Source
from ampscope.trace.vocabulary import Cause, Severity, Verdict
from tests.support.trace_builder import TraceBuilder
from tests.support.verdicts.growing import RATE, UNMEASURED, growing

STEPS, EVERY = 150, 5


def warned(diagnosis: Diagnosis) -> Incident:
    assert diagnosis.verdict is Verdict.AT_RISK
    assert isinstance(diagnosis.primary, Incident)
    assert diagnosis.primary.severity is Severity.WARNING
    return diagnosis.primary


class Steps(TraceBuilder):
    """A training of which every fifth step is traced."""

    def train(self, sizes: dict[int, Callable[[int], float]], **facts: Any) -> Path:
        for step in range(STEPS):
            self.step(
                scale=1024.0, **{name: value(step) if callable(value) else value for name, value in facts.items()}
            )
            for site, size in sizes.items() if step % EVERY == 0 else ():
                self.op(site, step=step, source=Source.LIVE, min=-size(step), max=0.0, **UNMEASURED)
        return self.close()


def steady(size: float) -> Callable[[int], float]:
    return lambda step: size * (1.0 + 0.02 * (step // EVERY % 3))


def falling(size: float) -> Callable[[int], float]:
    return lambda step: size * 0.95**step


class TestGrowth:
    def test_it_is_told_before_it_breaks(self, run_folder: Path) -> None:
        diagnosis = ampscope.diagnose(growing(run_folder).close())
        told = warned(diagnosis)
        end = math.log(65504.0 / 8.0) / math.log(RATE)
        assert told.cause is Cause.TREND_OVERFLOW
        assert (told.op, told.module, told.phase) == ("aten.add.Tensor", "blocks.1", "forward")
        assert told.source is not None
        assert told.source.line == 12
        assert told.step == 195
        assert told.forecast_step is not None
        assert told.forecast_low is not None
        assert told.forecast_high is not None
        assert abs(told.forecast_step - end) < 0.05 * end
        assert told.forecast_low <= end <= told.forecast_high
        assert told.headroom_bits == pytest.approx(math.log2(65504.0 / (8.0 * RATE**195)))
        assert "2 % a step" in told.explanation
        assert f"step {told.forecast_step:,}" in diagnosis.summary
        assert told.remedies

    def test_of_a_gradient_the_loss_scale_makes_room_for_it(self, run_folder: Path) -> None:
        trace = Steps(run_folder)
        site = trace.site("aten.mm.default", phase=Phase.BACKWARD)
        assert ampscope.diagnose(trace.train({site: lambda step: 8.0 * RATE**step})).verdict is Verdict.HEALTHY

    @pytest.mark.parametrize("traced", [True, False], ids=["traced to its end", "traced at its beginning"])
    def test_what_the_run_has_passed_is_not_told(self, run_folder: Path, traced: bool) -> None:
        trace = growing(run_folder)
        site = trace.site("aten.exp.default", module="head")
        for step in range(200, 600):  # it was to overflow at step 455
            trace.step(step=step, scale=1024.0)
            if traced and step % 5 == 0:
                trace.op(site, step=step, source=Source.LIVE, min=0.0, max=1.0 + step % 3, **UNMEASURED)
        assert ampscope.diagnose(trace.close()).verdict is Verdict.HEALTHY

    def test_nor_is_what_has_not_been_seen_for_long(self, run_folder: Path) -> None:
        trace = growing(run_folder)
        for step in range(200, 400):
            trace.step(step=step, scale=1024.0)
        assert ampscope.diagnose(trace.close()).verdict is Verdict.HEALTHY

    @pytest.mark.parametrize(("name", "told"), [("the scale", False), ("another factor", True)])
    def test_a_loss_scale_that_grows_makes_no_value_overflow(self, run_folder: Path, name: str, told: bool) -> None:
        trace = TraceBuilder(run_folder)
        single = {"out_dtypes": ("float32",), "out_shapes": ("",), "phase": Phase.LOSS, "module": ""}
        factor = trace.site(Node.INPUT, name="an operand of aten.mul.Tensor", in_dtypes=(), **single)
        scaled = trace.site("aten.mul.Tensor", **single)
        for step in range(60):
            scale = 2.0**step
            trace.step(scale=scale if name == "the scale" else 2.0)
            trace.op(factor, step=step, source=Source.LIVE, numel=1, min=scale, max=scale, **UNMEASURED)
            wobble = scale * (1.0 + 0.01 * (step % 3))
            trace.op(scaled, step=step, source=Source.LIVE, numel=1, min=wobble, max=wobble, **UNMEASURED)
            trace.edge(0, 1, step=step, source=Source.LIVE)
        assert ampscope.diagnose(trace.close()).verdict is (Verdict.AT_RISK if told else Verdict.HEALTHY)

    def test_what_has_happened_needs_no_warning(self, run_folder: Path) -> None:
        trace = growing(run_folder)
        trace.step(step=200, skipped=True)
        site = trace.site("aten.exp.default", module="head")
        entry = trace.site(Node.INPUT, name="x", in_dtypes=())
        loss = trace.site(Node.LOSS, name="loss", in_dtypes=("float16",))
        trace.op(entry, step=200, min=0.0, max=12.0)
        trace.op(site, step=200, min=1.0, max=math.inf)
        trace.op(loss, step=200, min=math.inf, max=math.inf)
        trace.edge(0, 1, step=200)
        trace.edge(1, 2, step=200)
        trace.incident(step=200, trigger="nonfinite_loss", replay=ReplayStatus.EXACT)
        diagnosis = ampscope.diagnose(trace.close())
        assert diagnosis.verdict is Verdict.PROBLEM
        assert [each.cause for each in diagnosis.incidents] == [Cause.FP16_OVERFLOW]


class TestNearness:
    def test_a_value_that_may_not_double_is_told(self, run_folder: Path) -> None:
        trace = Steps(run_folder)
        told = warned(ampscope.diagnose(trace.train({trace.site("aten.mm.default", module="fc"): steady(40000.0)})))
        assert (told.cause, told.op, told.module) == (Cause.NEAR_OVERFLOW, "aten.mm.default", "fc")
        assert told.headroom_bits is not None
        assert told.headroom_bits < 1
        assert told.forecast_step is None
        assert told.step == 145

    def test_one_step_is_told_throughout(self, run_folder: Path) -> None:
        trace = Steps(run_folder)
        path = trace.train({trace.site("aten.mm.default"): lambda step: 50000.0 if step == 140 else 40000.0})
        told = warned(ampscope.diagnose(path))
        assert told.step == 140
        assert "reached 50,000 at step 140," in told.explanation
        assert told.outputs[0].statistics.min == -50000.0
        assert told.headroom_bits == pytest.approx(math.log2(65504 / 50000))

    @pytest.mark.parametrize(("moves", "told"), [(1e-6, True), (0.0, False)])
    def test_what_hardly_moves_is_no_constant(self, run_folder: Path, moves: float, told: bool) -> None:
        trace = Steps(run_folder)
        sizes = {trace.site("aten.mm.default"): lambda step: 65000.0 * (1.0 + moves * (step % 3))}
        diagnosis = ampscope.diagnose(trace.train(sizes))
        assert diagnosis.verdict is (Verdict.AT_RISK if told else Verdict.HEALTHY)

    @pytest.mark.parametrize(
        ("op", "facts", "size"),
        [
            ("aten.mm.default", {}, 20000.0),
            ("aten.mm.default", {"out_dtypes": ("bfloat16",)}, 40000.0),
            ("aten.mm.default", {"out_dtypes": ("float32",)}, 1e30),
            ("aten.masked_fill.Scalar", {"scalars": '{"value": -40000.0}'}, 40000.0),
            ("aten.clamp.default", {"scalars": '{"max": 41600.0}'}, 40000.0),
            ("aten.full.default", {"in_dtypes": ()}, 40000.0),
            (Node.INPUT, {"in_dtypes": (), "name": "x"}, 40000.0),
        ],
    )
    def test_what_has_room_or_is_meant_is_not(
        self, run_folder: Path, op: str, facts: dict[str, Any], size: float
    ) -> None:
        trace = Steps(run_folder)
        assert ampscope.diagnose(trace.train({trace.site(op, **facts): steady(size)})).verdict is Verdict.HEALTHY

    @pytest.mark.parametrize(("reader", "harmless"), [("aten.tanh.default", True), ("aten.mul.Tensor", False)])
    def test_what_a_bounded_function_reads_may_be_large(self, run_folder: Path, reader: str, harmless: bool) -> None:
        trace = Steps(run_folder)
        large, read = trace.site("aten.mm.default"), trace.site(reader)
        for step in range(0, STEPS, EVERY):
            trace.edge(0, 1, step=step, source=Source.LIVE)
        diagnosis = ampscope.diagnose(trace.train({large: steady(40000.0), read: steady(1.0)}))
        assert diagnosis.verdict is (Verdict.HEALTHY if harmless else Verdict.AT_RISK)

    def test_a_mask_that_scores_were_added_to_is_meant(self, run_folder: Path) -> None:
        trace = Steps(run_folder)
        mask = trace.site("aten.masked_fill.Scalar", scalars='{"value": -40000.0}')
        added = trace.site("aten.add.Tensor")
        for step in range(0, STEPS, EVERY):
            trace.edge(0, 1, step=step, source=Source.LIVE)
        sizes = {mask: lambda _: 40000.0, added: steady(40010.0)}
        assert ampscope.diagnose(trace.train(sizes)).verdict is Verdict.HEALTHY


class TestFall:
    @staticmethod
    def gradients(trace: TraceBuilder, count: int) -> list[int]:
        ops = ("aten.mm.default", "aten.mul.Tensor", "aten.sum.dim_IntList")
        return [trace.site(op, phase=Phase.BACKWARD, module="blocks.0") for op in ops[:count]]

    def test_gradients_that_slide_below_float16_are_told(self, run_folder: Path) -> None:
        trace = Steps(run_folder)
        told = warned(ampscope.diagnose(trace.train(dict.fromkeys(self.gradients(trace, 3), falling(8.0)))))
        assert (told.cause, told.phase, told.module) == (Cause.TREND_UNDERFLOW, "backward", "blocks.0")
        end = math.log(8.0 / 2.0**-14) / -math.log(0.95)
        assert told.forecast_step is not None
        assert abs(told.forecast_step - end) < 0.05 * end
        assert told.headroom_bits is None

    @pytest.mark.parametrize(
        ("count", "size", "loss"),
        [
            (3, falling(8.0), falling(2.0)),  # learnt: nothing is left
            (2, falling(8.0), 2.0),  # one op's own matter
            (3, steady(8.0), 2.0),
            (3, falling(1e9), 2.0),  # too far away to tell
        ],
    )
    def test_others_are_not(self, run_folder: Path, count: int, size: Callable[[int], float], loss: Any) -> None:
        trace = Steps(run_folder)
        path = trace.train(dict.fromkeys(self.gradients(trace, count), size), loss=loss)
        assert ampscope.diagnose(path).verdict is Verdict.HEALTHY


class TestScaleWindow:
    COUNTS = (100, 400, 400, 100)  #: of a step's gradients, by exponent

    @classmethod
    def run(
        cls, folder: Path, low: int, *, top: float, zeros: int = 0, scale: float = 4.0, learnt: float = 0.0
    ) -> Diagnosis:
        trace = TraceBuilder(folder)
        large = trace.site("aten.mul.Tensor", phase=Phase.BACKWARD, module="head")
        site = trace.site("aten.mm.default", phase=Phase.BACKWARD, module="fc")
        subnormal = sum(count for number, count in enumerate(cls.COUNTS) if low + number < -14)
        for step in range(10):
            trace.step(scale=scale, loss=2.0 ** (learnt * (9 - step)))
            size = top * 2.0 ** (learnt * (9 - step)) * (1 + (step - 9) / 50)
            facts: dict[str, Any] = {"zeros": zeros, "subnormals": subnormal, "max_finite": top, "exp_low": low}
            facts = {**facts, "exp_counts": cls.COUNTS} if step == 8 else UNMEASURED
            trace.op(large, step=step, source=Source.LIVE, numel=1, min=0.0, max=2 * size, **UNMEASURED)
            trace.op(site, step=step, source=Source.LIVE, numel=1000 + zeros, min=-size, max=size, **facts)
        return ampscope.diagnose(trace.close())

    def test_a_scale_below_it_is_told_at_the_step_and_op_that_show_it(self, run_folder: Path) -> None:
        told = warned(self.run(run_folder, -17, top=2.0**-13.5))
        assert (told.cause, told.phase, told.module) == (Cause.SCALE_WINDOW, "backward", "fc")
        assert (told.op, told.step, told.headroom_bits) == ("aten.mm.default", 8, None)
        assert "between 32 and 2.147e9" in told.explanation
        assert "init_scale=2.0**29" in told.remedies[0].code

    def test_what_was_lost_altogether_may_need_more(self, run_folder: Path) -> None:
        told = warned(self.run(run_folder, -17, top=2.0**-13.5, zeros=800, scale=2.0**-12))
        assert "44% of all values were zero" in told.explanation
        assert "from a scale of 0.001953 on, what has become zero needs a larger one" in told.explanation
        assert "between" not in told.explanation
        assert "scale of 0.0002441," in told.explanation

    def test_gradients_that_fell_as_the_loss_was_learnt_need_no_other(self, run_folder: Path) -> None:
        assert self.run(run_folder, -17, top=2.0**-13.5, learnt=1.0).verdict is Verdict.HEALTHY

    def test_a_scale_that_cannot_be_is_not_told(self, run_folder: Path) -> None:
        assert self.run(run_folder, -17, top=2.0**-13.5, scale=1e308).verdict is Verdict.HEALTHY

    def test_one_inside_it_is_not(self, run_folder: Path) -> None:
        assert self.run(run_folder, -10, top=2.0**-6.5).verdict is Verdict.HEALTHY
