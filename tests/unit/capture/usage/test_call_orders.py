"""Loops as people write them: those of the manuals draw no finding, each mistake its own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from ampscope.trace.vocabulary import Cause
from tests.support.training.usage_bench import (
    BATCH,
    OVERFLOW,
    STEPS,
    WIDTH,
    Bench,
    Watch,
    findings_of,
    found_in,
    loss_of,
)

MICRO, SEVERAL = Cause.MISUSE_UPDATE_EACH_MICROBATCH, Cause.MISUSE_MULTIPLE_SCALERS_UPDATE
RAW, MISSING = Cause.MISUSE_NO_UNSCALE, Cause.MISUSE_MISSING_SCALER
SCHEDULE, STATE = Cause.MISUSE_SCHEDULER_ORDER, Cause.MISUSE_SCALER_STATE_NOT_RESTORED
CHECKPOINT = Cause.MISUSE_CHECKPOINT_AUTOCAST_MISMATCH
Loop = Callable[[Watch], Any]

RIGHT: dict[str, Loop] = {}
WRONG: dict[str, tuple[Loop, Cause, int]] = {}

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step", "ignore:.*different devices")


def right(loop: Loop) -> Loop:
    RIGHT[loop.__name__] = loop
    return loop


def wrong(cause: Cause, step: int = 0) -> Callable[[Loop], Loop]:
    def register(loop: Loop) -> Loop:
        WRONG[loop.__name__] = loop, cause, step
        return loop

    return register


# -- micro-batches, unscale_ and update -----------------------------------------------------------------------------


@wrong(MICRO)
def a_backward_after_unscale(watch: Watch) -> None:
    bench = Bench(watch)
    for _ in bench.steps():
        bench.scaler.unscale_(bench.optimizer)
        bench.scaler.scale(bench.loss()).backward()


@wrong(MICRO)
def unscale_after_each_backward(watch: Watch) -> None:
    bench = Bench(watch)
    for _ in bench.steps():
        bench.scaler.unscale_(bench.optimizer)
        bench.scaler.scale(bench.loss()).backward()
        bench.scaler.unscale_(bench.optimizer)


@wrong(MICRO)
def update_after_each_backward(watch: Watch) -> None:
    bench = Bench(watch)
    bench.scaled()
    bench.scaler.update()


@wrong(SEVERAL)
def unscale_twice(watch: Watch) -> None:
    bench = Bench(watch)
    for _ in bench.steps():
        bench.scaler.unscale_(bench.optimizer)
        bench.scaler.unscale_(bench.optimizer)


@wrong(SEVERAL)
def update_twice(watch: Watch) -> None:
    bench = Bench(watch)
    bench.scaled()
    bench.step()
    bench.scaler.update()


@wrong(SEVERAL, 1)
def update_forgotten(watch: Watch) -> None:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.scaled()
        bench.scaler.step(bench.optimizer)


@right
def accumulation_with_the_step_left_out_once(watch: Watch) -> Any:
    bench = Bench(watch)
    for number in range(2 * STEPS):
        bench.scaler.scale(bench.loss() / 2).backward()
        if number % 2:
            bench.scaler.unscale_(bench.optimizer)
            norm = nn.utils.clip_grad_norm_(bench.parameters, 1.0)
            if number != 3 and math.isfinite(norm):
                bench.scaler.step(bench.optimizer)
            bench.scaler.update()
            bench.optimizer.zero_grad(set_to_none=number > 3)
    return bench.state


@right
def clipping_on_a_step_that_is_skipped(watch: Watch) -> Any:
    bench = Bench(watch)
    for number in range(2 * STEPS):
        bench.scaled(OVERFLOW if number == 0 else 1.0)
        bench.scaler.unscale_(bench.optimizer)
        nn.utils.clip_grad_norm_(bench.parameters, 1.0)
        bench.step()
    return bench.state


# -- several losses, optimizers and scalers -------------------------------------------------------------------------


class Pair:
    """A generator and a critic, an optimizer for each."""

    def __init__(self, watch: Watch, *scales: float) -> None:
        self.generator, self.critic = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.of_generator = torch.optim.Adam(self.generator.parameters(), 1e-3)
        self.of_critic = torch.optim.Adam(self.critic.parameters(), 1e-3)
        self.scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in scales]
        watch([self.generator, self.critic], self.scalers[0])

    def losses(self) -> tuple[Tensor, Tensor]:
        """The critic's loss, and the generator's for the same fake batch, which reaches the critic too."""
        with torch.autocast("cpu", dtype=torch.float16):
            fake = self.generator(torch.randn(BATCH, WIDTH))
            real = self.critic(torch.randn(BATCH, WIDTH)).float().mean()
            return self.critic(fake.detach()).float().mean() - real, -self.critic(fake).float().mean()

    @property
    def state(self) -> list[Any]:
        return [self.generator, self.critic, self.of_generator, self.of_critic, *self.scalers]


@right
def a_pair_with_a_scaler_each(watch: Watch) -> Any:
    pair = Pair(watch, 512.0, 256.0)
    of_critic, of_generator = pair.scalers
    for number in range(STEPS):
        critic, generator = pair.losses()
        pair.of_critic.zero_grad(set_to_none=number % 2 == 0)
        of_critic.scale(critic).backward()
        of_generator.scale(generator).backward(inputs=list(pair.generator.parameters()))
        of_critic.step(pair.of_critic)
        of_critic.update()
        of_generator.step(pair.of_generator)
        of_generator.update()
        pair.of_generator.zero_grad(set_to_none=False)
    return pair.state


@right
def a_critic_stepped_more_often(watch: Watch) -> Any:
    pair = Pair(watch, 512.0)
    (scaler,) = pair.scalers
    for number in range(2 * STEPS):
        critic, generator = pair.losses()
        chosen, loss = (pair.of_generator, generator) if number % 3 == 2 else (pair.of_critic, critic)
        chosen.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(chosen)
        scaler.update()
    return pair.state


@right
def losses_scaled_before_either_backward(watch: Watch) -> Any:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        one, other = bench.scaler.scale([bench.loss(), bench.loss(-1.0)])
        one.backward()
        other.backward()
        bench.scaler.unscale_(bench.optimizer)
        bench.step()
    return bench.state


@right
def scaled_losses_added_up(watch: Watch) -> Any:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        (bench.scaler.scale(bench.loss()) + 0.5 * bench.scaler.scale(bench.loss(-1.0))).backward()
        bench.step()
    return bench.state


@right
def a_loss_multiplied_by_the_scale_by_hand(watch: Watch) -> Any:
    bench = Bench(watch)
    bench.scaled()
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        (bench.loss() * bench.scaler.get_scale()).backward()
        bench.step()
    return bench.state


@wrong(SEVERAL)
def scaled_by_one_and_stepped_by_another(watch: Watch) -> None:
    bench, other = Bench(watch), torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        loss = bench.loss()
        other.scale(loss.detach())
        bench.scaler.scale(loss).backward()
        other.step(bench.optimizer)
        other.update()


@wrong(SEVERAL)
def two_scalers_for_the_gradients_of_one_optimizer(watch: Watch) -> None:
    bench, other = Bench(watch), torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in bench.steps():
        other.scale(bench.loss(-1.0)).backward()


@wrong(SEVERAL)
def scalers_mixed_up(watch: Watch) -> None:
    pair = Pair(watch, 512.0, 256.0)
    for _ in range(STEPS):
        critic, generator = pair.losses()
        pair.of_critic.zero_grad()
        pair.of_generator.zero_grad()
        pair.scalers[0].scale(critic).backward()
        pair.scalers[1].scale(generator).backward(inputs=list(pair.generator.parameters()))
        pair.scalers[1].step(pair.of_critic)
        pair.scalers[0].step(pair.of_generator)
        for scaler in pair.scalers:
            scaler.update()


@wrong(MISSING)
def one_of_two_losses_not_scaled(watch: Watch) -> None:
    bench = Bench(watch)
    for _ in bench.steps():
        bench.loss(-1.0).backward()


@wrong(RAW)
def one_of_two_optimizers_past_the_scaler(watch: Watch) -> None:
    bench = Bench(watch)
    first, last = (torch.optim.SGD(bench.model[part].parameters(), 1e-3) for part in (0, 2))
    for _ in range(STEPS):
        bench.scaled()
        bench.scaler.step(first)
        last.step()
        bench.scaler.update()


# -- gradients in the loss, gradients by hand -----------------------------------------------------------------------


def penalized(watch: Watch, *, unscale: bool) -> Any:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        loss = bench.loss()
        gradients = torch.autograd.grad(bench.scaler.scale(loss), bench.parameters, create_graph=True)
        inverse = 1.0 / bench.scaler.get_scale() if unscale else 1.0
        penalty = sum((gradient * inverse).pow(2).sum() for gradient in gradients) ** 0.5
        bench.scaler.scale(loss + 1e-3 * penalty).backward()
        bench.step()
    return bench.state


RIGHT["a_penalty_on_unscaled_gradients"] = lambda watch: penalized(watch, unscale=True)
WRONG["a_penalty_on_scaled_gradients"] = lambda watch: penalized(watch, unscale=False), RAW, 0


@right
def a_fixed_scale_by_hand_and_no_scaler(watch: Watch) -> Any:
    bench = Bench(lambda model, _: watch(model))
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        (bench.loss() * 1024).backward()
        for gradient in bench.gradients:
            gradient.div_(1024)
        bench.optimizer.step()
    return bench.state


@right
def unscaled_and_stepped_by_hand(watch: Watch) -> Any:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.scaled()
        inverse = 1.0 / bench.scaler.get_scale()
        for gradient in bench.gradients:
            gradient.mul_(inverse)
        if math.isfinite(nn.utils.clip_grad_norm_(bench.parameters, 1.0)):
            bench.optimizer.step()
    return bench.state


@right
def two_forwards_to_a_step(watch: Watch) -> Any:
    """Sharpness-aware minimization: up along the gradient, a second gradient there, back down, step."""
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.scaled()
        bench.scaler.unscale_(bench.optimizer)
        moves = [gradient * (0.05 / (bench.norm + 1e-12)) for gradient in bench.gradients]
        bench.scaler.update()
        for sign in (1.0, -1.0):
            with torch.no_grad():
                torch._foreach_add_([*bench.parameters], moves, alpha=sign)
            if sign > 0:
                bench.scaled()
                bench.scaler.unscale_(bench.optimizer)
        bench.step()
    return bench.state


@right
def an_auxiliary_model_in_float32(watch: Watch) -> Any:
    bench, other = Bench(watch), nn.Linear(WIDTH, 1)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        loss = bench.loss()
        other(torch.randn(BATCH, WIDTH)).mean().backward()
        bench.scaler.scale(loss).backward()
        bench.step()
    return [*bench.state, other]


@right
def a_fused_optimizer_clipped_after_unscale(watch: Watch) -> Any:
    bench = Bench(watch, optimizer=torch.optim.Adam, fused=True)
    for _ in bench.steps():
        bench.scaler.unscale_(bench.optimizer)
        nn.utils.clip_grad_norm_(bench.parameters, 1.0)
    return bench.state


@wrong(Cause.MISUSE_CLIP_BEFORE_UNSCALE)
def a_fused_optimizer_clipped_while_scaled(watch: Watch) -> None:
    bench = Bench(watch, optimizer=torch.optim.Adam, fused=True)
    for _ in bench.steps():
        nn.utils.clip_grad_norm_(bench.parameters, 1.0)


# -- schedulers -----------------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "warm restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 10),
    "a plateau": lambda optimizer: lr_scheduler.StepLR(optimizer, 100),
    "a sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.1), lr_scheduler.CosineAnnealingLR(optimizer, 20)],
        [4],
    ),
}


def scheduled(watch: Watch, make: Callable[[torch.optim.Optimizer], Any], *, guarded: bool) -> Any:
    bench = Bench(watch)
    schedule = make(bench.optimizer)
    for number in range(2 * STEPS):
        bench.scaled(OVERFLOW if number in (2, 5) else 1.0)
        before = bench.scaler.get_scale()
        bench.step()
        if not guarded or bench.scaler.get_scale() >= before:
            schedule.step()
    return bench.state


for name, make in SCHEDULERS.items():
    RIGHT[f"{name}, waiting"] = partial(scheduled, make=make, guarded=True)
    WRONG[f"{name}, running on"] = partial(scheduled, make=make, guarded=False), SCHEDULE, 2


@right
def a_schedule_of_epochs(watch: Watch) -> Any:
    bench = Bench(watch)
    schedule = lr_scheduler.StepLR(bench.optimizer, 1, 0.5)
    for _ in range(2):
        for number in range(STEPS):
            bench.scaled(OVERFLOW if number == STEPS - 1 else 1.0)
            bench.step()
        schedule.step()
    return bench.state


# -- states ---------------------------------------------------------------------------------------------------------

HIGH = 2.0**20


def resumed(watch: Watch, *, restore: bool, renew: bool) -> Any:
    """Two stretches of training with a new scaler for the second; ``renew`` makes a new optimizer too."""
    bench = Bench(watch, scale=HIGH, optimizer=torch.optim.Adam)
    for _ in bench.steps(2 * STEPS):
        pass
    states = copy.deepcopy((bench.scaler.state_dict(), bench.optimizer.state_dict()))
    bench.scaler = torch.amp.GradScaler("cpu", init_scale=HIGH)
    if restore:
        bench.scaler.load_state_dict(states[0])
    if renew:
        bench.optimizer = torch.optim.Adam(bench.parameters, lr=1e-3)
        bench.optimizer.load_state_dict(states[1])
    for _ in bench.steps():
        pass
    return bench.state


for renew in (False, True):
    told = "a new optimizer" if renew else "the old optimizer"
    RIGHT[f"the scaler restored with {told}"] = partial(resumed, restore=True, renew=renew)
    WRONG[f"the scaler forgotten with {told}"] = (
        partial(resumed, restore=False, renew=renew),
        STATE,
        2 * STEPS,
    )


def resumed_elsewhere(watch: Watch, *, restore: bool) -> Any:
    """A fresh process, as far as watch can tell: it sees the second stretch only."""
    first = Bench(lambda *_: None, scale=HIGH, optimizer=torch.optim.Adam)
    for _ in first.steps(2 * STEPS):
        pass
    states = copy.deepcopy([part.state_dict() for part in first.state])
    seen: list[Any] = []
    bench = Bench(lambda *given: seen.extend(given), scale=HIGH, optimizer=torch.optim.Adam)
    for part, state in zip(bench.state[: 3 if restore else 2], states, strict=False):
        part.load_state_dict(state)
    watch(*seen)
    for _ in bench.steps():
        pass
    return bench.state


RIGHT["the scaler restored in a fresh process"] = lambda watch: resumed_elsewhere(watch, restore=True)
WRONG["the scaler forgotten in a fresh process"] = lambda watch: resumed_elsewhere(watch, restore=False), STATE, 0


# -- autocast and precision -----------------------------------------------------------------------------------------


@wrong(Cause.MISUSE_AUTOCAST_SPANS_STEP)
def one_region_for_all_steps(watch: Watch) -> None:
    bench = Bench(watch)
    with torch.autocast("cpu", dtype=torch.float16):
        for _ in range(STEPS):
            bench.optimizer.zero_grad()
            loss = bench.loss()
            with torch.autocast("cpu", enabled=False):
                bench.scaler.scale(loss).backward()
            bench.step()


@wrong(Cause.HALF_PARAMS)
def one_layer_in_half(watch: Watch) -> None:
    bench = Bench(lambda *_: None)
    bench.model[2].half()
    watch(bench.model, bench.scaler)
    for _ in bench.steps():
        pass


class Recomputed(torch.autograd.Function):
    """Activation checkpointing that forgets the autocast state."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, gradient.to(y.dtype))
        return None, x.grad


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Recomputed.apply(self.block, x.requires_grad_()))


@wrong(CHECKPOINT)
def recomputed_in_another_precision(watch: Watch) -> None:
    model = Checkpointed()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-3), torch.amp.GradScaler("cpu", init_scale=256.0)
    watch(model, scaler)
    for _ in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("name", RIGHT)
def test_a_correct_loop_draws_no_finding(name: str, run_folder: Path) -> None:
    assert findings_of(RIGHT[name], run_folder) == ()


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_found_with_its_step_and_line(name: str, run_folder: Path) -> None:
    loop, cause, step = WRONG[name]
    diagnosis, _ = found_in(loop, run_folder)
    finding = diagnosis.findings[0]
    assert {each.cause for each in diagnosis.findings} == {cause}
    assert finding.step == step
    assert finding.source is not None
    assert Path(finding.source.file).name in ("test_call_orders.py", "usage_bench.py")
    assert finding.explanation
    assert finding.remedies[0].code
    assert diagnosis.primary == finding
