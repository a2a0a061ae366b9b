"""Faults that lie around the model's calls are told by what they are; their healthy twins are not alarmed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ampscope
from ampscope.analysis.diagnosis.diagnosis import diagnose
from ampscope.analysis.results import Diagnosis, Finding, Incident
from ampscope.trace.schema import Phase
from ampscope.trace.vocabulary import Cause, Verdict

Watch = Callable[..., Any]
Program = Callable[[Watch], None]
HALF = torch.float16


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def scaler(scale: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale)


def loss_of(model: nn.Module, times: float = 1.0) -> Tensor:
    with torch.autocast("cpu", HALF):
        out = model(torch.randn(8, 8))
    return times * out.float().square().mean()


def scaled_step(scaling: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaling.unscale_(optimizer)
    nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 1.0)
    scaling.step(optimizer)
    scaling.update()


Diagnosed = Callable[[Program], Diagnosis]


def is_calm(diagnosis: Diagnosis) -> bool:
    """Whether nothing of the run is a problem."""
    return diagnosis.primary is None


# -- gradients of a skipped step --------------------------------------------------------------------------------------


def skips(clear: Callable[[torch.optim.Optimizer, float], None], micro_batches: int = 1) -> Program:
    """A loop whose scale is too large for some steps, and that clears as it is told: by the norm of the gradients."""

    def program(watch: Watch) -> None:
        model, scaling = net(), scaler(2.0**14)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        watch(model, scaling)
        for step in range(12):
            for _ in range(micro_batches):
                scaling.scale(loss_of(model, 1e3)).backward()
            scaling.unscale_(optimizer)
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            scaling.step(optimizer)
            scaling.update()
            clear(optimizer, norm)
            assert step >= 0

    return program


def only_after_good_steps(optimizer: torch.optim.Optimizer, norm: float) -> None:
    if norm < float("inf"):
        optimizer.zero_grad()


def always(optimizer: torch.optim.Optimizer, _: float) -> None:
    optimizer.zero_grad()


def in_place(optimizer: torch.optim.Optimizer, _: float) -> None:
    optimizer.zero_grad(set_to_none=False)


def by_data(optimizer: torch.optim.Optimizer, _: float) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.data.zero_()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_that_a_skipped_step_leaves_are_told(diagnosed: Diagnosed, micro_batches: int) -> None:
    found = diagnosed(skips(only_after_good_steps, micro_batches)).primary
    assert found is not None
    assert (found.cause, found.step) == (Cause.MISUSE_GRADIENTS_KEPT, 0)
    assert found.source is not None
    assert "scaling.step(optimizer)" in found.source.code


@pytest.mark.parametrize("clear", [always, in_place, by_data])
def test_gradients_that_are_cleared_after_a_skip_are_not(diagnosed: Diagnosed, clear: Any) -> None:
    assert diagnosed(skips(clear)).findings == ()


def test_gradients_that_another_loss_adds_to_before_they_are_cleared_are_not(diagnosed: Diagnosed) -> None:
    """So a GAN does: the generator's backward runs through the critic, whose step clears what that has left."""

    def program(watch: Watch) -> None:
        critic, generator, scaling = net(), nn.Linear(8, 8), scaler(2.0**15)
        of_critic, of_generator = (torch.optim.Adam(each.parameters(), 1e-3) for each in (critic, generator))
        watch([critic, generator], scaling)
        for _ in range(10):
            of_critic.zero_grad()
            scaling.scale(loss_of(critic, 1e3)).backward()
            scaling.step(of_critic)
            of_generator.zero_grad()
            scaling.scale(loss_of(nn.Sequential(generator, critic), 1e3)).backward()
            scaling.step(of_generator)
            scaling.update()

    assert all(each.cause is not Cause.MISUSE_GRADIENTS_KEPT for each in diagnosed(program).findings)


# -- numbers of the optimizer -----------------------------------------------------------------------------------------


def with_numbers(settings: Callable[[int], dict[str, float]]) -> Program:
    def program(watch: Watch) -> None:
        model, scaling = net(), scaler(2.0**8)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
        watch(model, scaling)
        for step in range(8):
            optimizer.zero_grad()
            scaling.scale(loss_of(model)).backward()
            optimizer.param_groups[0].update(settings(step))
            scaled_step(scaling, optimizer)

    return program


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_learning_rate_that_is_not_finite_is_told_at_the_step_that_it_ruins(
    diagnosed: Diagnosed, number: float
) -> None:
    found = diagnosed(with_numbers(lambda step: {"lr": number if step == 5 else 1e-2})).primary
    assert isinstance(found, Incident)
    assert (found.cause, found.step, found.phase, found.module) == (Cause.BAD_OPTIMIZER_STATE, 5, Phase.OPTIMIZER, "0")
    assert f"The optimizer's lr, by which it steps 0.weight and the others of its group, was {found_word(number)}" in (
        found.explanation
    )
    assert "finite when the optimizer stepped last, at step 4" in found.explanation
    assert found.source is not None
    assert found.source.code == "scaling.step(optimizer)"


def found_word(number: float) -> str:
    return "NaN" if number != number else "infinite"  # noqa: PLR0124


def test_a_bound_that_is_infinite_and_a_rate_of_zero_are_not_told(diagnosed: Diagnosed) -> None:
    assert is_calm(diagnosed(with_numbers(lambda step: {"most": float("inf"), "lr": 1e-2 * (step > 2)})))


# -- weights that are cast in between ---------------------------------------------------------------------------------


def with_validation(cast: Callable[[nn.Module], nn.Module]) -> Program:
    def program(watch: Watch) -> None:
        model, scaling = net(), scaler(2.0**8)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        watch(model, scaling)
        for step in range(6):
            optimizer.zero_grad()
            scaling.scale(loss_of(model)).backward()
            scaled_step(scaling, optimizer)
            if step == 2:
                with torch.no_grad():
                    cast(model)(torch.randn(4, 8, dtype=HALF))

    return program


def test_weights_that_were_cast_between_steps_explain_the_scalers_error(diagnosed: Diagnosed) -> None:
    found = diagnosed(with_validation(lambda model: model.half())).primary
    assert found is not None
    assert (found.cause, found.step) == (Cause.HALF_PARAMS, 3)
    assert "4 of the optimizer's 4 parameters with gradients were not float16 at the step before" in found.explanation
    assert "deepcopy" in found.remedies[0].code


def test_a_copy_that_was_cast_is_not_told(diagnosed: Diagnosed) -> None:
    assert is_calm(diagnosed(with_validation(lambda model: copy.deepcopy(model).half())))


# -- what the loop computes before the model, and derivatives of its own ----------------------------------------------


def with_shift(area: Callable[[int], float], *, steps: int = 6) -> Program:
    def program(watch: Watch) -> None:
        model, scaling = net(), scaler(2.0**8)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        watch(model, scaling)
        for step in range(steps):
            side = torch.full((8, 1), area(step), dtype=HALF)
            ratio = (side * side / 4e4).sqrt()
            t = ratio / (1 + ratio)
            optimizer.zero_grad()
            with torch.autocast("cpu", HALF):
                out = model(torch.randn(8, 8, dtype=HALF) * t)
            scaling.scale(out.float().square().mean()).backward()
            scaled_step(scaling, optimizer)

    return program


def test_what_the_loop_computes_before_the_model_is_of_the_step(diagnosed: Diagnosed) -> None:
    diagnosis = diagnosed(with_shift(lambda step: 512.0 if step == 3 else 200.0))
    found = diagnosis.primary
    assert isinstance(found, Incident)
    assert (found.cause, found.step, found.op, found.module) == (Cause.FP16_OVERFLOW, 3, "aten.mul.Tensor", "")
    assert "The loop computes that before it calls the model, in the same step" in found.explanation
    assert [each for each in diagnosis.incidents if each.cause is Cause.BAD_INPUT] == []


def test_what_the_loop_computes_is_no_bad_batch_where_nobody_listened_at_first(diagnosed: Diagnosed) -> None:
    diagnosis = diagnosed(with_shift(lambda step: 512.0 if step > 40 else 200.0, steps=45))
    found = diagnosis.primary
    assert isinstance(found, Incident)
    assert (found.cause, found.op) == (Cause.FP16_OVERFLOW, "aten.mul.Tensor")
    assert "The loop computes that before it calls the model, in the same step" in found.explanation
    first = next(each for each in diagnosis.incidents if each.step == 41)
    assert (first.cause, found.step > 41) == (Cause.UNKNOWN, True)
    assert "In this step that was not followed" in first.explanation


def with_teacher(bad: int, *, steps: int) -> Program:
    """A loop that asks a teacher in half precision first, which overflows in one step."""

    def program(watch: Watch) -> None:
        model, teacher, scaling = net(), net().requires_grad_(False), scaler(2.0**8)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        watch(model, scaling)
        for step in range(steps):
            x = torch.randn(8, 8) * (1e6 if step == bad else 1.0)
            optimizer.zero_grad()
            with torch.autocast("cpu", HALF), torch.no_grad():
                hint = teacher(x).mean(1, keepdim=True)
                hint = hint.float() / 2
            with torch.autocast("cpu", HALF):
                out = model(x.sign() + hint)
            scaling.scale(out.float().square().mean()).backward()
            scaled_step(scaling, optimizer)

    return program


def test_one_bad_step_of_what_the_loop_computes_first_is_followed_early_in_a_run(diagnosed: Diagnosed) -> None:
    found = diagnosed(with_teacher(14, steps=18)).primary
    assert isinstance(found, Incident)
    assert (found.cause, found.step, found.op) == (Cause.FP16_OVERFLOW, 14, "aten._to_copy.default")
    assert found.source is not None
    assert "teacher(x)" in found.source.code


def test_later_in_a_run_it_is_not_said_to_be_the_batch(diagnosed: Diagnosed) -> None:
    found = diagnosed(with_teacher(38, steps=42)).primary
    assert isinstance(found, Incident)
    assert (found.cause, found.step) == (Cause.UNKNOWN, 38)
    assert "In this step that was not followed" in found.explanation
    line = next(at for at, text in enumerate(Path(__file__).read_text("utf-8").splitlines(), 1) if "(x).mean(1" in text)
    assert f"by mean in float16 at test_between_steps.py:{line}" in found.explanation


@pytest.mark.parametrize("prepare", [lambda x: (x - 1.0) / torch.full((8,), 2.0), Tensor.half])
def test_a_bad_batch_is_told_with_the_line_that_prepares_it_where_that_cannot_have_made_it_bad(
    diagnosed: Diagnosed, prepare: Callable[[Tensor], Tensor]
) -> None:
    def program(watch: Watch) -> None:
        model, scaling = net(), scaler(2.0**8)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        watch(model, scaling)
        for step in range(42):
            batch = torch.randn(8, 8)
            batch[3, 3] = math.nan if step == 38 else 0.0
            batch = prepare(batch)
            optimizer.zero_grad()
            with torch.autocast("cpu", HALF):
                out = model(batch)
            scaling.scale(out.float().square().mean()).backward()
            scaled_step(scaling, optimizer)

    found = diagnosed(program).primary
    assert isinstance(found, Incident)
    assert (found.cause, found.step) == (Cause.BAD_INPUT, 38)
    assert "The loop prepares it at test_between_steps.py:" in found.explanation


def test_a_batch_that_was_bad_stays_one(diagnosed: Diagnosed) -> None:
    def program(watch: Watch) -> None:
        batches = [torch.randn(8, 8).index_fill(0, torch.tensor(3), math.nan if at > 40 else 0.0) for at in range(45)]
        model, scaling = net(), scaler(2.0**8)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        watch(model, scaling)
        for batch in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", HALF):
                out = model(batch)
            scaling.scale(out.float().square().mean()).backward()
            scaled_step(scaling, optimizer)

    found = diagnosed(program).primary
    assert isinstance(found, Incident)
    assert (found.cause, found.step) == (Cause.BAD_INPUT, 41)


def test_a_small_picture_is_healthy(diagnosed: Diagnosed) -> None:
    assert is_calm(diagnosed(with_shift(lambda _: 200.0)))


@pytest.mark.parametrize("at", [3, None])
def test_data_that_the_loop_prepares_is_the_batch_and_the_line_that_prepared_it_is_told(
    diagnosed: Diagnosed, at: int | None
) -> None:
    """The logarithm of a price of 0 is -inf in every dtype; no layer is to blame, nor is half precision."""

    def program(watch: Watch) -> None:
        model, scaling = net(), scaler(2.0**8)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        watch(model, scaling)
        for step in range(6):
            price = torch.rand(8, 9) + 0.5
            if step == at:
                price[2, 8] = 0.0
            returns = price.log().diff(dim=1)
            optimizer.zero_grad()
            with torch.autocast("cpu", HALF):
                out = model(returns)
            scaling.scale(out.float().square().mean()).backward()
            scaled_step(scaling, optimizer)

    found = diagnosed(program).primary
    if at is None:
        assert found is None
        return
    assert isinstance(found, Incident)
    assert (found.cause, found.step, found.module) == (Cause.BAD_INPUT, at, "0")
    assert "log at test_between_steps.py" in found.explanation
    assert found.written_by is not None
    assert found.written_by.source is not None
    assert "price.log()" in found.written_by.source.code


def with_penalty(steep: float, *, scaled: bool) -> Program:
    """A loss of the derivative of the model with respect to its input, as it is or of the scaled loss."""

    def program(watch: Watch) -> None:
        model, scaling = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), scaler(2.0**10)
        optimizer = torch.optim.SGD(model.parameters(), 1e-6)
        watch(model, scaling)
        for step in range(6):
            x = torch.rand(16, 2, requires_grad=True)
            optimizer.zero_grad()
            with torch.autocast("cpu", HALF):
                y = model(x).float() * (steep if step == 4 else 1.0)
                of = scaling.scale(y.sum()) if scaled else y.sum()
                (slope,) = torch.autograd.grad(of, x, create_graph=True)
                slope = slope / scaling.get_scale() if scaled else slope
                loss = 1e-3 * F.softsign(slope).square().mean() + 1e-3 * y.clamp(-1, 1).square().mean()
            scaling.scale(loss).backward()
            scaled_step(scaling, optimizer)

    return program


@pytest.mark.parametrize(("scaled", "cause"), [(False, Cause.FP16_OVERFLOW), (True, Cause.SCALE_OVERFLOW)])
def test_a_derivative_that_the_loop_takes_carries_the_scale_only_of_a_scaled_loss(
    diagnosed: Diagnosed, scaled: bool, cause: Cause
) -> None:
    found = diagnosed(with_penalty(1e6 if not scaled else 300.0, scaled=scaled)).primary
    assert isinstance(found, Incident)
    assert (found.cause, found.step, found.phase) == (cause, 4, Phase.BACKWARD)


# -- errors -----------------------------------------------------------------------------------------------------------


def ends_by(error: Callable[[Tensor], object], times: float) -> Program:
    """A loop that hands what the model gives to code that is none of torch's, and ends by its error."""

    def program(watch: Watch) -> None:
        model, scaling = net(), scaler(2.0**8)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        watch(model, scaling)
        for step in range(6):
            with torch.autocast("cpu", HALF):
                out = model(torch.randn(8, 8))
                cost = (out * (times if step == 4 else 1.0)).square()
            error(cost) if step == 4 else None
            optimizer.zero_grad()
            scaling.scale(cost.float().mean()).backward()
            scaled_step(scaling, optimizer)

    return program


def test_what_the_first_step_computes_before_the_model_is_told_as_that_of_later_ones_is(
    diagnosed: Callable[[Program], Diagnosis],
) -> None:
    def program(watch: Watch) -> None:
        model, scaling = net(), scaler(1.0)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        watch(model, scaling)
        for _ in range(6):
            drawn = torch.rand(512, 3).half()
            noise = -torch.log(-torch.log(drawn))  # infinite where the drawn number rounded to 0 or 1
            with torch.autocast("cpu", HALF):
                chosen = (model(torch.randn(512, 8)) + noise).softmax(-1)
            optimizer.zero_grad()
            scaling.scale(chosen.float().square().mean()).backward()
            scaled_step(scaling, optimizer)

    found = diagnosed(program).primary
    assert isinstance(found, Incident)
    assert (found.cause, found.op, found.step) == (Cause.LOG_ZERO, "aten.log.default", 0)
    assert "The loop computes that before it calls the model, in the same step." in found.explanation


def clipped_by_hand(watch: Watch, dtype: torch.dtype, loud: float) -> None:
    """A training whose own clipping takes the norm of all gradients in some dtype."""
    model, scaling = net(), scaler(1.0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    watch(model, scaling)
    for _ in range(10):
        optimizer.zero_grad()
        scaling.scale(loss_of(model, loud)).backward()
        scaling.unscale_(optimizer)
        held = [each.grad for each in model.parameters() if each.grad is not None]
        norm = torch.cat([each.flatten() for each in held]).to(dtype).square().sum().sqrt()
        for each in held:
            each.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0).float())
        scaling.step(optimizer)
        scaling.update()


def test_a_norm_for_clipping_that_overflows_is_told_by_its_op(diagnosed: Callable[[Program], Diagnosis]) -> None:
    found = diagnosed(lambda watch: clipped_by_hand(watch, HALF, 1e4)).primary
    assert isinstance(found, Incident)
    assert (found.cause, found.op, found.step) == (Cause.FP16_OVERFLOW, "aten.pow.Tensor_Scalar", 0)
    assert found.source is not None
    assert "square()" in found.source.code


@pytest.mark.parametrize(("dtype", "loud"), [(HALF, 1.0), (torch.float32, 1e4)], ids=["small gradients", "in float32"])
def test_a_norm_for_clipping_that_is_finite_is_not_told(
    diagnosed: Callable[[Program], Diagnosis], dtype: torch.dtype, loud: float
) -> None:
    told = diagnosed(lambda watch: clipped_by_hand(watch, dtype, loud))
    assert told.verdict is Verdict.HEALTHY, told.summary


def trained(watch: Watch, between: Callable[[int, nn.Module], object], *, first: Callable[..., object] = id) -> None:
    """A float16 training that does something to its model between its steps."""
    model, scaling = net(), scaler(2.0**8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    watch(model, scaling)
    first(model)
    for step in range(6):
        optimizer.zero_grad()
        scaling.scale(loss_of(model)).backward()
        scaled_step(scaling, optimizer)
        between(step, model)


def in_half(step: int, model: nn.Module, at: int = 2) -> None:
    if step == at:
        model.half()  # cast here
        with torch.no_grad():
            model(torch.randn(8, 8).half())
        model.float()


def test_weights_that_were_in_half_precision_between_two_steps_are_told_with_the_line(
    diagnosed: Callable[[Program], Diagnosis],
) -> None:
    told = diagnosed(lambda watch: trained(watch, in_half))
    found = told.primary
    assert isinstance(found, Finding)
    assert (found.cause, found.step) == (Cause.HALF_PARAMS, 2)
    assert found.source is not None
    assert found.source.code.endswith("# cast here")
    assert "casts 4 of 4 parameters that are trained to float16" in found.explanation


def test_a_buffer_that_a_cast_of_the_model_has_made_infinite_is_told_with_the_line(diagnosed: Diagnosed) -> None:
    def program(watch: Watch) -> None:
        norm = nn.BatchNorm1d(8)
        model, scaling = nn.Sequential(norm, nn.Linear(8, 3)), scaler(2.0**8)
        assert norm.running_var is not None
        norm.running_var.fill_(2e5)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        watch(model, scaling)
        for step in range(6):
            optimizer.zero_grad()
            scaling.scale(loss_of(model)).backward()
            scaled_step(scaling, optimizer)
            in_half(step, model)

    found = diagnosed(program).primary
    assert isinstance(found, Incident)
    assert (found.cause, found.step, found.module) == (Cause.BAD_BUFFER, 3, "0")
    assert found.source is not None
    assert found.source.code.endswith("# cast here")
    assert found.explanation.startswith(
        "The buffer 0.running_var was infinite when the step first read it. The forward"
    )
    assert "deepcopy" in found.remedies[0].code


def test_a_cast_that_cannot_have_made_a_buffer_infinite_is_not_blamed_for_it(diagnosed: Diagnosed) -> None:
    def program(watch: Watch) -> None:
        norm = nn.BatchNorm1d(8)
        model, scaling = nn.Sequential(norm, nn.Linear(8, 3)), scaler(2.0**8)
        assert norm.running_var is not None
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        watch(model, scaling)
        for step in range(6):
            optimizer.zero_grad()
            scaling.scale(loss_of(model)).backward()
            scaled_step(scaling, optimizer)
            if step == 2:
                model.bfloat16()
                norm.running_var.fill_(math.inf)
                model.float()

    told = diagnosed(program)
    found = next(each for each in told.incidents if each.cause is Cause.BAD_BUFFER)
    assert "ends at 65,504" not in found.explanation
    assert any("to bfloat16" in each.explanation for each in told.findings)


@pytest.mark.parametrize(
    ("between", "first"),
    [
        pytest.param(lambda step, model: in_half(step, copy.deepcopy(model)), id, id="a copy"),
        pytest.param(lambda step, model: in_half(step, model, at=5), id, id="after the last step"),
        pytest.param(lambda step, model: None, lambda model: model.half().float(), id="before the first step"),
        pytest.param(lambda step, model: model.float().to("cpu"), id, id="moves"),
    ],
)
def test_casts_that_lose_nothing_are_not_told(
    diagnosed: Callable[[Program], Diagnosis],
    between: Callable[[int, nn.Module], object],
    first: Callable[..., object],
) -> None:
    told = diagnosed(lambda watch: trained(watch, between, first=first))
    assert told.verdict is Verdict.HEALTHY, told.summary


def test_weights_that_stay_in_half_precision_are_told_with_the_line_that_cast_them(
    diagnosed: Callable[[Program], Diagnosis],
) -> None:
    told = diagnosed(lambda watch: trained(watch, lambda step, model: model.half() if step == 2 else None))
    (found,) = [each for each in told.findings if each.cause is Cause.HALF_PARAMS]
    assert found.source is not None
    assert "model.half() if step == 2" in found.source.code


def refused(_: Tensor) -> None:
    message = "matrix contains invalid numeric entries"
    raise ValueError(message)


def test_an_error_of_other_code_is_explained_by_the_value_that_it_was_given(tmp_path: Path) -> None:
    found = ended(tmp_path, ends_by(refused, 6e4)).primary
    assert isinstance(found, Incident)
    assert (found.cause, found.step, found.op) == (Cause.FP16_OVERFLOW, 4, "aten.pow.Tensor_Scalar")
    assert "The error that it led to: ValueError: matrix contains invalid numeric entries" in found.explanation


def test_an_error_is_explained_by_nothing_where_all_is_finite(tmp_path: Path) -> None:
    found = ended(tmp_path, ends_by(refused, 1.0)).primary
    assert isinstance(found, Incident)
    assert found.cause is Cause.EXCEPTION


@pytest.mark.parametrize(
    ("made_for", "why"),
    [
        (copy.deepcopy, "they are no parameters of the watched model"),
        (lambda model: model.requires_grad_(False), "all of them have requires_grad=False"),
        (lambda model: model, "the backward of this step did not reach them"),
    ],
)
def test_a_step_without_a_gradient_says_why_there_is_none(
    tmp_path: Path, made_for: Callable[[nn.Module], nn.Module], why: str
) -> None:
    def program(watch: Watch) -> None:
        model, head, scaling = net(), nn.Linear(3, 3), scaler(2.0**8)
        optimizer = torch.optim.SGD(made_for(model).parameters(), 1e-2)
        watch(model, scaling)
        with torch.autocast("cpu", HALF):
            out = head(model(torch.randn(8, 8)).detach())
        scaling.scale(out.float().square().mean()).backward()
        scaling.step(optimizer)

    found = ended(tmp_path, program).primary
    assert isinstance(found, Incident)
    assert (found.cause, found.step) == (Cause.EXCEPTION, 0)
    assert f"None of the 4 parameters that the optimizer steps has a gradient: {why}" in found.explanation


def ended(tmp_path: Path, program: Program) -> Diagnosis:
    """The diagnosis of a program that its own error ends."""
    torch.manual_seed(0)
    with pytest.raises((ValueError, AssertionError)), ExitStack() as scopes:
        program(lambda *given: scopes.enter_context(ampscope.watch(*given, dir=tmp_path / "run", quiet=True)))
    return diagnose(tmp_path / "run")


def _collated(samples: Tensor) -> Iterator[Tensor]:
    """Batches of samples with targets, as `torch.utils.data.DataLoader` collates and a loop moves them."""
    data = [(sample, torch.rand(1)) for sample in samples]
    for batch, targets in DataLoader(data, batch_size=8):  # type: ignore[arg-type]
        targets.to("cpu")
        yield batch.to("cpu")


def _shifted(samples: Tensor) -> Iterator[Tensor]:
    """Batches that the loop changes in place, too large to be copied before that."""
    for each in samples.view(-1, 8, 8).numpy():
        batch = torch.from_numpy(each.repeat(5_000, axis=0))
        yield batch.sub_(0.5)


@pytest.mark.parametrize("batches", [_collated, _shifted])
def test_a_batch_that_was_loaded_bad_is_bad_input_and_no_tensor_that_the_loop_carries(
    diagnosed: Diagnosed, batches: Callable[[Tensor], Iterator[Tensor]]
) -> None:
    def program(watch: Watch) -> None:
        samples = torch.randn(8 * 9, 8)
        samples[8 * 4 + 3, 5] = math.nan
        model, scaling = net(), scaler(2.0**8)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        watch(model, scaling)
        for batch in batches(samples):
            optimizer.zero_grad()
            with torch.autocast("cpu", HALF):
                out = model(batch)
            scaling.scale(out.float().square().mean()).backward()
            scaled_step(scaling, optimizer)

    diagnosis = diagnosed(program)
    found = diagnosis.primary
    assert isinstance(found, Incident)
    assert (found.cause, found.step, found.written_by) == (Cause.BAD_INPUT, 4, None)
    assert "carries" not in found.explanation
    assert len(diagnosis.incidents) == 1


@pytest.mark.parametrize("at", [20, 58])
def test_a_learning_rate_that_stays_zero_is_told_from_there_on_and_a_schedule_may_end_at_zero(
    diagnosed: Diagnosed, at: int
) -> None:
    def program(watch: Watch) -> None:
        model, scaling = net(), scaler(2.0**8)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        watch(model, scaling)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / at))
        for _ in range(60):
            optimizer.zero_grad()
            scaling.scale(loss_of(model)).backward()
            scaled_step(scaling, optimizer)
            schedule.step()

    told = diagnosed(program)
    if at == 58:
        assert is_calm(told)
        return
    found = told.primary
    assert isinstance(found, Finding)
    assert (found.cause, found.step) == (Cause.NOTHING_TRAINS, 20)
    assert "exactly zero in the last 40 steps of the run" in found.explanation


def test_what_lost_the_steps_is_told_before_the_schedule_that_ran_ahead_in_them(diagnosed: Diagnosed) -> None:
    def program(watch: Watch) -> None:
        model, scaling = net(), scaler(2.0**8)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        watch(model, scaling)
        for step in range(40):
            if step == 20:
                next(model.parameters()).data[0, 0] = math.nan
            optimizer.zero_grad()
            scaling.scale(loss_of(model)).backward()
            scaled_step(scaling, optimizer)
            schedule.step()

    told = diagnosed(program)
    assert isinstance(told.primary, Incident)
    assert (told.primary.cause, told.primary.step) == (Cause.BAD_WEIGHT, 20)
    assert Cause.MISUSE_SCHEDULER_ORDER in {each.cause for each in told.findings}


def test_a_mask_of_plus_infinity_under_softmax_is_told_with_a_remedy(diagnosed: Diagnosed) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = (q @ k.T).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), math.inf)
            return scores.softmax(-1) @ v

    def program(watch: Watch) -> None:
        model = Attention()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        watch(model)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = model(torch.randn(8, 8))
            out.float().square().mean().backward()
            optimizer.step()

    found = diagnosed(program).primary
    assert isinstance(found, Incident)
    assert found.op == "aten._softmax.default"
    assert "was given an infinity" in found.explanation
    assert found.remedies[0].code == "x = x.clamp(-1e4, 1e4)"
