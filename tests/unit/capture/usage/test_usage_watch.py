"""Correct loops draw no finding; mistaken ones draw theirs, at the user's own line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampscope
from ampscope.trace.vocabulary import Cause
from tests.support.training.model_parts import grad_of, linear
from tests.support.training.small_loop import BATCH, WIDTH, here, make_scaler, mlp, mse
from tests.support.training.step_traces import line_of
from tests.support.training.twin_runs import Watched, train_both

pytestmark = pytest.mark.usefixtures("device")

STEPS = 4


class Bench:
    """A model, its optimizer, a scaler and random batches."""

    def __init__(self, watch: Callable[..., object], *, scaler: bool = True) -> None:
        self.model = mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.scaler = make_scaler(enabled=scaler)
        self.parameters = list(self.model.parameters())
        watch(self.model, self.scaler if scaler else None)

    def loss(self, dtype: torch.dtype = torch.float16) -> Tensor:
        with torch.autocast(here(), dtype=dtype):
            return mse(self.model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))

    def scaled(self) -> None:
        self.scaler.scale(self.loss()).backward()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    @property
    def state(self) -> list[Any]:
        return [self.model, self.optimizer, self.scaler]


CORRECT: list[Callable[..., Any]] = []
MISTAKEN: list[tuple[Callable[..., Any], Cause, str]] = []


def correct(loop: Callable[..., Any]) -> Callable[..., Any]:
    CORRECT.append(loop)
    return loop


def mistaken(cause: Cause, code: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a loop with the mistake it makes and the code of the line it makes it in."""

    def register(loop: Callable[..., Any]) -> Callable[..., Any]:
        MISTAKEN.append((loop, cause, code))
        return loop

    return register


@correct
def the_recipe(watch: Callable[..., object]) -> Any:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        bench.scaled()
        bench.step()
    return bench.state


@correct
def accumulation_and_clipping_after_unscale(watch: Callable[..., object]) -> Any:
    bench = Bench(watch)
    for _ in range(STEPS):
        for _ in range(2):
            bench.scaler.scale(bench.loss() / 2).backward()
        bench.scaler.unscale_(bench.optimizer)
        nn.utils.clip_grad_norm_(bench.parameters, 1.0)
        nn.utils.clip_grad_value_(bench.parameters, 0.5)
        bench.step()
        bench.optimizer.zero_grad()
    return bench.state


@correct
def clipping_by_hand_after_unscale(watch: Callable[..., object]) -> Any:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        bench.scaled()
        bench.scaler.unscale_(bench.optimizer)
        total = torch.stack([grad_of(p).norm() for p in bench.parameters]).norm()
        for parameter in bench.parameters:
            grad_of(parameter).mul_(min(1.0, 1.0 / float(total)))
        bench.step()
    return bench.state


@correct
def scaled_gradients_divided_by_a_constant(watch: Callable[..., object]) -> Any:
    """The mean over micro-batches, taken on the gradients: the scale passes through."""
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        bench.scaled()
        bench.scaled()
        for parameter in bench.parameters:
            assert parameter.grad is not None
            parameter.grad.div_(2)
            parameter.grad *= 0.5
            parameter.grad.mul_(2.0)
        bench.step()
    return bench.state


@correct
def scaled_gradients_masked(watch: Callable[..., object]) -> Any:
    """Pruning and frozen rows: zero stays zero whatever the scale."""
    bench = Bench(watch)
    mask = torch.ones(WIDTH, WIDTH)
    mask[0] = 0
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        bench.scaled()
        grad_of(linear(bench.model, "0").weight).mul_(mask)
        grad_of(linear(bench.model, "2").weight)[0] = 0.0
        bench.step()
    return bench.state


@correct
def gradient_norms_logged_while_scaled(watch: Callable[..., object]) -> Any:
    bench = Bench(watch)
    seen = []
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        bench.scaled()
        seen.append(torch.stack([grad_of(p).norm() for p in bench.parameters]).norm().item() / bench.scaler.get_scale())
        bench.step()
    return [*bench.state, seen]


@correct
def gradient_norms_logged_and_gradients_averaged(watch: Callable[..., object]) -> Any:
    """Both of the above: a constant factor stays one although a norm was computed before."""
    bench = Bench(watch)
    seen = []
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        bench.scaled()
        bench.scaled()
        seen.append(torch.stack([grad_of(p).norm() for p in bench.parameters]).norm().item())
        for parameter in bench.parameters:
            grad_of(parameter).mul_(0.5)
        bench.step()
    return [*bench.state, seen]


@correct
def gradients_cleared_between_forward_and_backward(watch: Callable[..., object]) -> Any:
    bench = Bench(watch)
    for number in range(STEPS):
        loss = bench.loss()
        bench.optimizer.zero_grad(set_to_none=number % 2 == 0)
        bench.scaler.scale(loss).backward()
        bench.step()
    return bench.state


@correct
def gradients_set_to_zero(watch: Callable[..., object]) -> Any:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.scaled()
        bench.step()
        bench.optimizer.zero_grad(set_to_none=False)
    return bench.state


@correct
def several_losses_scaled_one_by_one(watch: Callable[..., object]) -> Any:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        with torch.autocast(here(), dtype=torch.float16):
            out = bench.model(torch.randn(BATCH, WIDTH))
            losses = [out.float().pow(2).mean(), out.float().abs().mean()]
        bench.scaler.scale(losses[0]).backward(retain_graph=True)
        bench.scaler.scale(losses[1]).backward()
        bench.step()
    return bench.state


@correct
def a_gan_with_one_scaler(watch: Callable[..., object]) -> Any:
    generator, critic = mlp(), nn.Linear(WIDTH, 1)
    scaler = make_scaler()
    optimizers = [torch.optim.Adam(model.parameters(), 1e-3) for model in (generator, critic)]
    watch([generator, critic], scaler)
    for _ in range(STEPS):
        with torch.autocast(here(), dtype=torch.float16):
            fake = generator(torch.randn(BATCH, WIDTH))
            loss = F.softplus(-critic(torch.randn(BATCH, WIDTH))).mean() + F.softplus(critic(fake.detach())).mean()
        optimizers[1].zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizers[1])
        nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
        scaler.step(optimizers[1])
        optimizers[0].zero_grad()
        with torch.autocast(here(), dtype=torch.float16):
            loss = F.softplus(-critic(fake)).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizers[0])
        scaler.update()
    return [generator, critic, *optimizers, scaler]


@correct
def one_of_two_optimizers_without_the_scaler(watch: Callable[..., object]) -> Any:
    """One model trains in fp32 beside one in fp16; its gradients were never scaled."""
    half, single = mlp(), mlp()
    scaler = make_scaler()
    one, other = torch.optim.SGD(half.parameters(), 0.01), torch.optim.SGD(single.parameters(), 0.01)
    watch([half, single], scaler)
    for _ in range(STEPS):
        one.zero_grad()
        other.zero_grad()
        with torch.autocast(here(), dtype=torch.float16):
            loss = mse(half, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
        scaler.scale(loss).backward()
        mse(single, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)).backward()
        other.step()
        scaler.step(one)
        scaler.update()
    return [half, single, one, other, scaler]


@correct
def bf16_without_a_scaler(watch: Callable[..., object]) -> Any:
    bench = Bench(watch, scaler=False)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        bench.loss(torch.bfloat16).backward()
        nn.utils.clip_grad_norm_(bench.parameters, 1.0)
        bench.optimizer.step()
    return bench.state


@correct
def a_disabled_scaler_in_single_precision(watch: Callable[..., object]) -> Any:
    bench = Bench(watch, scaler=False)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        bench.scaler.scale(mse(bench.model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))).backward()
        bench.scaler.unscale_(bench.optimizer)
        nn.utils.clip_grad_norm_(bench.parameters, 1.0)
        bench.step()
    return bench.state


@correct
def skips_while_accumulating(watch: Callable[..., object]) -> Any:
    bench = Bench(watch)
    for number in range(STEPS):
        bench.scaled()
        bench.scaler.scale(bench.loss() * (2.0**22 if number == 1 else 1.0)).backward()
        bench.scaler.unscale_(bench.optimizer)
        nn.utils.clip_grad_norm_(bench.parameters, 1.0)
        bench.step()
        bench.optimizer.zero_grad()
    return bench.state


@correct
def an_evaluation_in_half_precision(watch: Callable[..., object]) -> Any:
    """fp16 without a scaler is fine where nothing is trained."""
    bench = Bench(watch, scaler=False)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        mse(bench.model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)).backward()
        bench.optimizer.step()
        with torch.no_grad():
            bench.loss()
    return bench.state


@pytest.mark.parametrize("loop", CORRECT, ids=lambda loop: loop.__name__)
def test_a_correct_loop_draws_no_finding(loop: Callable[..., Any], run_folder: Path) -> None:
    watched = train_both(loop, run_folder)
    assert [(row.cause, row.code) for row in watched.findings] == []
    assert ampscope.diagnose(watched.run).findings == ()


@mistaken(Cause.MISUSE_CLIP_BEFORE_UNSCALE, "clip_grad_norm_(")
def norm_clipped_while_scaled(watch: Callable[..., object]) -> None:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        bench.scaled()
        nn.utils.clip_grad_norm_(bench.parameters, 1.0)
        bench.step()


@mistaken(Cause.MISUSE_CLIP_BEFORE_UNSCALE, "clip_grad_value_(")
def values_clipped_while_scaled(watch: Callable[..., object]) -> None:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        bench.scaled()
        nn.utils.clip_grad_value_(bench.parameters, 0.5)
        bench.step()


@mistaken(Cause.MISUSE_CLIP_BEFORE_UNSCALE, "grad_of(parameter).mul_(")
def clipped_by_hand_while_scaled(watch: Callable[..., object]) -> None:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        bench.scaled()
        total = torch.stack([grad_of(p).norm() for p in bench.parameters]).norm()
        for parameter in bench.parameters:
            grad_of(parameter).mul_(torch.clamp(1.0 / total, max=1.0))
        bench.step()


@mistaken(Cause.MISUSE_CLIP_BEFORE_UNSCALE, "grad_of(parameter).data.clamp_(")
def clamped_by_hand_while_scaled(watch: Callable[..., object]) -> None:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        bench.scaled()
        for parameter in bench.parameters:
            grad_of(parameter).data.clamp_(-1.0, 1.0)
        bench.step()


@mistaken(Cause.MISUSE_CLIP_BEFORE_UNSCALE, "grad_of(parameter).div_(")
def divided_by_a_norm_taken_to_python(watch: Callable[..., object]) -> None:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        bench.scaled()
        total = float(torch.stack([grad_of(p).norm() for p in bench.parameters]).norm())
        for parameter in bench.parameters:
            grad_of(parameter).div_(max(1.0, total))
        bench.step()


@mistaken(Cause.MISUSE_UPDATE_EACH_MICROBATCH, "bench.scaler.update()")
def the_scale_updated_at_every_micro_batch(watch: Callable[..., object]) -> None:
    bench = Bench(watch)
    for number in range(2 * STEPS):
        bench.scaled()
        bench.scaler.unscale_(bench.optimizer)
        nn.utils.clip_grad_norm_(bench.parameters, 1.0)
        if number % 2:
            bench.scaler.step(bench.optimizer)
            bench.optimizer.zero_grad()
        bench.scaler.update()


@mistaken(Cause.MISUSE_BACKWARD_UNDER_AUTOCAST, ".backward()")
def backward_inside_autocast(watch: Callable[..., object]) -> None:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        with torch.autocast(here(), dtype=torch.float16):
            loss = mse(bench.model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
            bench.scaler.scale(loss).backward()
        bench.step()


@mistaken(Cause.MISUSE_NO_UNSCALE, "bench.optimizer.step()")
def the_optimizer_stepped_past_the_scaler(watch: Callable[..., object]) -> None:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        bench.scaled()
        bench.optimizer.step()


@mistaken(Cause.MISUSE_MISSING_SCALER, "bench.optimizer.step()")
def half_precision_without_a_scaler(watch: Callable[..., object]) -> None:
    bench = Bench(watch, scaler=False)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        bench.loss().backward()
        bench.optimizer.step()


@mistaken(Cause.MISUSE_MISSING_SCALER, "optimizer.step()")
def half_precision_inside_the_model_without_a_scaler(watch: Callable[..., object]) -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        @torch.autocast(here(), dtype=torch.float16)
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model = Inside()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.mse_loss(model(torch.randn(BATCH, WIDTH)).float(), torch.randn(BATCH, WIDTH)).backward()
        optimizer.step()


def until_refused(scaler: Any, *calls: Callable[[], object]) -> None:
    """Makes calls of which torch refuses one, for nothing was scaled."""
    assert scaler._scale is None
    with pytest.raises(AssertionError, match="_scale is None"):
        for call in calls:
            call()


@mistaken(Cause.MISUSE_MISSING_SCALER, "bench.scaler.step(")
def a_step_with_a_scaler_that_has_scaled_nothing(watch: Callable[..., object]) -> None:
    bench = Bench(watch)
    bench.loss().backward()
    until_refused(bench.scaler, lambda: bench.scaler.step(bench.optimizer))


@mistaken(Cause.MISUSE_MISSING_SCALER, "bench.scaler.unscale_(")
def gradients_unscaled_by_a_scaler_that_has_scaled_nothing(watch: Callable[..., object]) -> None:
    bench = Bench(watch)
    bench.loss().backward()
    until_refused(bench.scaler, lambda: bench.scaler.unscale_(bench.optimizer))


@pytest.mark.parametrize(("loop", "cause", "code"), MISTAKEN, ids=[loop.__name__ for loop, *_ in MISTAKEN])
def test_a_mistake_is_found_at_its_line(loop: Callable[..., Any], cause: Cause, code: str, run_folder: Path) -> None:
    watched = Watched.train(loop, run_folder)
    assert watched.warnings == []
    (finding,) = watched.findings
    assert finding.cause == cause
    assert (Path(finding.file).name, finding.line) == (Path(__file__).name, line_of(loop, code))
    assert loop.__name__ in finding.function
    assert finding.step == 0
    diagnosis = ampscope.diagnose(watched.run)
    assert [one.cause for one in diagnosis.findings] == [cause]
    assert diagnosis.primary == diagnosis.findings[0]
