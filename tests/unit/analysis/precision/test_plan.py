"""The precision plan of modules whose values are known one by one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampscope import open_run
from ampscope.analysis.precision.plan import HISTORY, Plan, plan
from ampscope.report.precision_words import answer, notes, without_code
from ampscope.trace.schema import Node, Phase, Source
from tests.support.trace_builder import TraceBuilder
from tests.support.verdicts.counted import statistics_of

NORMAL = np.random.default_rng(0).normal(size=2048)
FLOAT32: dict[str, Any] = {"in_dtypes": ("float32",), "out_dtypes": ("float32",)}


def plan_of(trace: TraceBuilder) -> Plan:
    with open_run(trace.close()) as run:
        return plan(run)


def with_op(trace: TraceBuilder, module: str, values: np.ndarray, **site: Any) -> int:
    number = trace.site(module=module, **{**FLOAT32, **site})
    return trace.op(number, source=Source.LIVE, **statistics_of(values))


def test_each_module_is_judged_in_each_format(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    trace.step(scale=None, traced=Source.LIVE)
    with_op(trace, "calm", NORMAL)
    with_op(trace, "large", NORMAL * 1e5)
    with_op(trace, "tiny", NORMAL * 1e-8)
    found = plan_of(trace)
    fits = {each.module: {name: loss.fits for name, loss in each.formats.items()} for each in found.modules}
    assert all(fits["calm"].values())
    assert (fits["large"]["float16"], fits["large"]["bfloat16"], fits["large"]["float8_e4m3fn"]) == (False, True, True)
    assert (fits["tiny"]["float16"], fits["tiny"]["bfloat16"], fits["tiny"]["float8_e4m3fn"]) == (False, True, True)
    assert found.stay_up["float16"] == ("large", "tiny")
    assert found.code["float16"] == 'ampscope.keep_fp32(model, [\n    "large",\n    "tiny",\n])'
    large = found.modules[1].formats["float16"]
    assert large.overflow_share == pytest.approx((np.abs(NORMAL * 1e5) >= 65520).mean(), abs=0.01)
    assert large.why == "overflow_share"


def test_delayed_scaling_goes_by_the_steps_before(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    site = trace.site(module="grows", **FLOAT32)
    for step in range(3):
        trace.step(scale=None, traced=Source.LIVE)
        trace.op(site, step=step, source=Source.LIVE, **statistics_of(NORMAL * 4.0**step))
    found = plan_of(trace)
    largest, scaled = np.abs(NORMAL).max(), [NORMAL, NORMAL, NORMAL * 4, NORMAL * 4][:1] + [NORMAL * 4] * 2
    past = np.mean([(np.abs(each) * 448 / largest > 464).mean() for each in scaled])
    assert found.modules[0].formats["float8_e4m3fn"].overflow_share == pytest.approx(past, abs=0.01)
    assert past > 0.2
    assert found.delayed_share == pytest.approx(2 / 3)
    assert found.modules[0].formats["mxfp8_e4m3"].fits


def test_float16_is_judged_at_the_loss_scale_of_the_next_step(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    trace.step(scale=1024.0, traced=Source.LIVE)
    with_op(trace, "fc", NORMAL)
    trace.scaler_event(step=0, optimizer=0, scale_before=1024.0, scale_after=512.0)
    assert plan_of(trace).gradient_scale == 512.0


def test_gradients_count_by_mass_and_carry_no_loss_scale(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    trace.step(scale=1024.0, traced=Source.LIVE)
    with_op(trace, "fc", NORMAL)
    back = np.concatenate([NORMAL * 1e-9, np.full(16, 1e-3)]) * 1024.0
    with_op(trace, "fc", back, phase=Phase.BACKWARD)
    found = plan_of(trace)
    (module,) = found.modules
    assert (module.tensors, module.gradients, found.gradient_scale) == (1, 1, 1024.0)
    e4m3 = module.formats["float8_e4m3fn"]
    sizes = np.abs(back)
    lost = sizes[sizes * 448 / sizes.max() <= 2.0**-10].sum() / sizes.sum()
    assert e4m3.gradient_lost_share == pytest.approx(lost, abs=0.01)
    assert lost < 0.05 < (sizes * 448 / sizes.max() <= 2.0**-10).mean()


def test_the_gradient_of_the_loss_is_no_modules(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "once")
    trace.step(scale=65536.0, traced=Source.LIVE)
    with_op(trace, "", NORMAL)
    loss = trace.site("aten.mul.Tensor", module="", phase=Phase.LOSS, **FLOAT32)
    scaled = np.full(1, 65536.0)  # the scale itself, which float16 does not hold
    with_op(trace, "", scaled, phase=Phase.BACKWARD, forward_site=loss)
    (model,) = plan_of(trace).modules
    assert (model.gradients, model.formats["float16"].fits) == (0, True)
    again = TraceBuilder(tmp_path / "again")
    again.step(scale=65536.0, traced=Source.LIVE)
    with_op(again, "", NORMAL)
    own = again.site("aten.add.Tensor", module="", **FLOAT32)
    with_op(again, "", scaled, phase=Phase.BACKWARD, forward_site=own)
    (model,) = plan_of(again).modules
    assert model.gradients == 1


def test_the_scale_of_a_tensor_remembers_the_steps_before_and_no_others(tmp_path: Path) -> None:
    """What is long ago counts no more; what is measured by turns is looked for further back."""
    trace = TraceBuilder(tmp_path)
    often = trace.site(module="often", **FLOAT32)
    seldom = trace.site(Node.GRADIENT, name="w", module="seldom", phase=Phase.BACKWARD, **FLOAT32)
    param = trace.site(module="seldom", **FLOAT32)
    for step in range(HISTORY + 2):
        trace.step(scale=None, traced=Source.LIVE)
        size = 100.0 if step == 0 else 1.0
        last = step == HISTORY + 1
        counts = statistics_of(NORMAL) if last else {"zeros": None, "exp_low": None, "exp_counts": None}
        trace.op(often, step=step, source=Source.LIVE, **{**counts, "min": -size, "max": size, "numel": 2048})
        if last:
            trace.op(param, step=step, source=Source.LIVE, **statistics_of(NORMAL))
        if last or step == 0:
            trace.op(seldom, step=step, source=Source.LIVE, **{**counts, "min": -size, "max": size, "numel": 2048})
    found = {each.module: each.formats["float8_e4m3fn"] for each in plan_of(trace).modules}
    assert found["often"].overflow_share is not None
    assert found["often"].overflow_share > 0.2  # scaled by 1, of the steps before, where it reaches 3
    assert found["seldom"].gradient_overflow_share == 0.0  # scaled by 100


def test_a_product_is_judged_with_what_it_is_given(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    trace.step(scale=None, traced=Source.LIVE)
    spread = np.exp(6 * NORMAL)
    given = with_op(trace, "act", spread)
    product = with_op(trace, "fc", NORMAL, op="aten.mm.default", module_type="Linear")
    trace.edge(given, product, source=Source.LIVE)
    with_op(trace, "other", NORMAL, op="aten.mm.default", module_type="Linear")
    found = plan_of(trace)
    fits = {each.module: each.formats["float8_e4m3fn"].fits for each in found.modules}
    assert fits == {"act": False, "fc": False, "other": True}
    assert '    "other",' in found.code["float8_e4m3fn"]
    assert "fc" not in found.code["float8_e4m3fn"]


def test_what_overflowed_in_float16_stays_up(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    trace.step(traced=Source.LIVE)
    half: dict[str, Any] = {"in_dtypes": ("float16",), "out_dtypes": ("float16",)}
    with_op(trace, "broken", np.append(NORMAL * 1e4, np.inf), **half)
    with_op(trace, "masked", np.append(NORMAL, -np.inf), **half)
    found = plan_of(trace)
    assert found.stay_up["float16"] == ("broken",)
    assert [each.overflowed for each in found.modules] == [True, False]


def test_what_was_not_measured_is_not_judged(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    trace.step(scale=None, traced=Source.LIVE)
    with_op(trace, "back", NORMAL, phase=Phase.BACKWARD)
    (module,) = plan_of(trace).modules
    assert {loss.fits for loss in module.formats.values()} == {None}
    assert module.formats["float16"].overflow_share is None
    assert module.formats["float16"].gradient_lost_share is not None


def test_casts_and_batches_are_no_values_of_a_module(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    trace.step(scale=None, traced=Source.LIVE)
    with_op(trace, "fc", NORMAL * 1e9, op="aten._to_copy.default", cast="explicit")
    with_op(trace, "", NORMAL * 1e9, op=Node.INPUT)
    with_op(trace, "fc", NORMAL)
    (module,) = plan_of(trace).modules
    assert (module.module, module.tensors, module.formats["float16"].fits) == ("fc", 1, True)


def test_a_run_without_counted_exponents_has_no_plan(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    trace.step()
    assert plan_of(trace) == Plan()


def test_weights_alone_do_not_say_that_a_module_fits(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    trace.step(scale=None, traced=Source.LIVE)
    for module, values in (("fc", NORMAL), ("large", NORMAL * 1e5), ("whole", NORMAL)):
        with_op(trace, module, values, op=Node.PARAMETER, name=f"{module}.weight")
        weight = trace.op(
            trace.site(module=module, op="aten._to_copy.default", cast="autocast", **FLOAT32),
            source=Source.LIVE,
            **statistics_of(values),
        )
        product = with_op(trace, module, NORMAL if module == "whole" else NORMAL * math.nan, op="aten.mm.default")
        trace.edge(weight, product, source=Source.LIVE)
    found = plan_of(trace)
    fits = {each.module: (each.formats["float16"].fits, each.formats["bfloat16"].fits) for each in found.modules}
    assert fits == {"fc": (None, None), "large": (False, None), "whole": (True, True)}
    (alone,) = [each for each in found.modules if each.module == "fc"]
    assert alone.formats["float16"].lost_share is None
    assert found.stay_up["float16"] == ("large",)


def test_a_plan_of_weights_alone_says_so_and_has_no_code(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    trace.step(scale=None, traced=Source.LIVE)
    with_op(trace, "fc", NORMAL, op=Node.PARAMETER, name="fc.weight", module_type="Linear")
    found = plan_of(trace)
    assert not any(found.code.values())
    assert answer(found).startswith("Weights alone were finite")
    assert "at which ones gradients fit it is not known" in " ".join(notes(found))
    assert without_code(found, "float8_e4m3fn") == "No module's values were measured."
