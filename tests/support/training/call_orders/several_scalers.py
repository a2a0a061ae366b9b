"""Several losses, optimizers and scalers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ampscope.trace.vocabulary import Cause
from tests.support.training.call_orders.registry import right, wrong
from tests.support.training.small_loop import here
from tests.support.training.usage_bench import (
    BATCH,
    STEPS,
    WIDTH,
    Bench,
    Watch,
)


class Pair:
    """A generator and a critic, an optimizer for each."""

    def __init__(self, watch: Watch, *scales: float) -> None:
        self.generator, self.critic = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.of_generator = torch.optim.Adam(self.generator.parameters(), 1e-3)
        self.of_critic = torch.optim.Adam(self.critic.parameters(), 1e-3)
        self.scalers = [torch.amp.GradScaler(here(), init_scale=scale) for scale in scales]
        watch([self.generator, self.critic], self.scalers[0])

    def losses(self) -> tuple[Tensor, Tensor]:
        """The critic's loss, and the generator's for the same fake batch, which reaches the critic too."""
        with torch.autocast(here(), dtype=torch.float16):
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
def losses_scaled_one_after_the_other(watch: Watch) -> Any:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        one = bench.scaler.scale(bench.loss())
        other = bench.scaler.scale(bench.loss(-1.0) * (1.0 + one.detach() / bench.scaler.get_scale()))
        (one + other).backward()
        bench.step()
    return bench.state


@right
def a_scaled_loss_unscaled_and_scaled_again(watch: Watch) -> Any:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        plain = bench.scaler.scale(bench.loss()) / bench.scaler.get_scale()
        bench.scaler.scale(plain).backward()
        bench.step()
    return bench.state


@right
def a_penalty_on_unscaled_gradients_of_a_scaled_loss(watch: Watch) -> Any:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        loss = bench.loss()
        scaled = torch.autograd.grad(bench.scaler.scale(loss).square(), bench.parameters, create_graph=True)
        inverse = 1.0 / bench.scaler.get_scale() ** 2
        penalty = torch.stack([(gradient * inverse).square().sum() for gradient in scaled]).sum()
        bench.scaler.scale(loss + penalty).backward()
        bench.step()
    return bench.state


@wrong(Cause.MISUSE_MULTIPLE_SCALERS_UPDATE)
def a_loss_scaled_twice(watch: Watch) -> None:
    bench = Bench(watch, scale=64.0)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        bench.scaler.scale(bench.scaler.scale(bench.loss())).backward()
        bench.step()


@wrong(Cause.MISUSE_MULTIPLE_SCALERS_UPDATE)
def parts_of_a_loss_scaled_and_then_their_mean(watch: Watch) -> None:
    bench = Bench(watch, scale=64.0)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        parts = [bench.scaler.scale(bench.loss(sign)) for sign in (1.0, -1.0)]
        bench.scaler.scale((parts[0] + parts[1]) / 2).backward()
        bench.step()


@right
def a_loss_multiplied_by_the_scale_by_hand(watch: Watch) -> Any:
    bench = Bench(watch)
    bench.scaled()
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        (bench.loss() * bench.scaler.get_scale()).backward()
        bench.step()
    return bench.state


@wrong(Cause.MISUSE_MULTIPLE_SCALERS_UPDATE)
def scaled_by_one_and_stepped_by_another(watch: Watch) -> None:
    bench, other = Bench(watch), torch.amp.GradScaler(here(), init_scale=64.0)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        loss = bench.loss()
        other.scale(loss.detach())
        bench.scaler.scale(loss).backward()
        other.step(bench.optimizer)
        other.update()


@wrong(Cause.MISUSE_MULTIPLE_SCALERS_UPDATE)
def two_scalers_for_the_gradients_of_one_optimizer(watch: Watch) -> None:
    bench, other = Bench(watch), torch.amp.GradScaler(here(), init_scale=64.0)
    for _ in bench.steps():
        other.scale(bench.loss(-1.0)).backward()


@wrong(Cause.MISUSE_MULTIPLE_SCALERS_UPDATE)
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


@wrong(Cause.MISUSE_MISSING_SCALER)
def one_of_two_losses_not_scaled(watch: Watch) -> None:
    bench = Bench(watch)
    for _ in bench.steps():
        bench.loss(-1.0).backward()


@wrong(Cause.MISUSE_NO_UNSCALE)
def one_of_two_optimizers_past_the_scaler(watch: Watch) -> None:
    bench = Bench(watch)
    first, last = (torch.optim.SGD(bench.model[part].parameters(), 1e-3) for part in (0, 2))
    for _ in range(STEPS):
        bench.scaled()
        bench.scaler.step(first)
        last.step()
        bench.scaler.update()


@right
def two_optimizers_of_one_model(watch: Watch) -> None:
    bench = Bench(watch)
    first, second = (torch.optim.SGD(each, 1e-3) for each in (bench.parameters[:2], bench.parameters[2:]))
    for _ in range(STEPS):
        bench.scaler.scale(bench.loss()).backward()
        for optimizer in (first, second):
            bench.scaler.unscale_(optimizer)
            bench.scaler.step(optimizer)
        bench.scaler.update()
        bench.model.zero_grad()


@wrong(Cause.MISUSE_MULTIPLE_SCALERS_UPDATE)
def unscaled_for_another_optimizer(watch: Watch) -> None:
    bench = Bench(watch)
    other = torch.optim.SGD(bench.model.parameters(), 1e-3)
    for _ in bench.steps():
        bench.scaler.unscale_(other)


@wrong(Cause.MISUSE_MULTIPLE_SCALERS_UPDATE)
def unscaled_again_after_an_update(watch: Watch) -> None:
    bench = Bench(watch)
    for _ in bench.steps():
        bench.scaler.unscale_(bench.optimizer)
        bench.scaler.update()
