"""Loops that run and change nothing are told, with why; their healthy twins are healthy."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampscope.analysis.results import Diagnosis
from ampscope.trace.vocabulary import Cause, Severity, Verdict

Watch = Callable[..., Any]
Program = Callable[[Watch], None]
SGD = torch.optim.SGD


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 8)
    return x, x[:, :3].argmax(1)


def loss_of(model: nn.Module, *, half: bool = True) -> Tensor:
    x, y = batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        out = model(x)
    return F.cross_entropy(out.float(), y)


def train(
    watch: Watch,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    steps: int = 12,
    loss: Callable[[nn.Module], Tensor] = loss_of,
    edit: Callable[[nn.Module, int], object] = lambda _, __: None,
    schedule: Callable[[int], float] | None = None,
    clear: Callable[[torch.optim.Optimizer, int], object] = lambda optimizer, _: optimizer.zero_grad(),
) -> None:
    """Clears, goes back, edits what there is, and steps."""
    optimizer = optimizer or SGD(model.parameters(), 0.1)
    watch(model)
    for step in range(steps):
        if schedule is not None:
            optimizer.param_groups[0]["lr"] = schedule(step)
        clear(optimizer, step)
        loss(model).backward()
        edit(model, step)
        optimizer.step()


def gradients(model: nn.Module) -> list[Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


def times_zero(model: nn.Module, _: int = 0) -> None:
    for each in gradients(model):
        each.mul_(1.0 / torch.tensor(float("inf")))


# -- nothing trains ---------------------------------------------------------------------------------------------------


def zeroed(watch: Watch) -> None:
    train(watch, net(), edit=times_zero)


def zeroed_under_weight_decay(watch: Watch) -> None:
    model = net()
    train(watch, model, torch.optim.AdamW(model.parameters(), 1e-2), edit=times_zero)


def cleared_too_early(watch: Watch) -> None:
    train(watch, net(), edit=lambda model, _: model.zero_grad())


def zeroed_once_unscaled(watch: Watch) -> None:
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=16.0)
    optimizer = SGD(model.parameters(), 0.1)
    watch(model, scaler)
    for _ in range(12):
        optimizer.zero_grad()
        x, y = batch()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        times_zero(model)
        scaler.step(optimizer)
        scaler.update()


def frozen(watch: Watch) -> None:
    model = net()
    model[2].requires_grad_(False)
    train(watch, model, SGD(model[2].parameters(), 0.1))


def detached(watch: Watch) -> None:
    def loss(model: nn.Module) -> Tensor:
        x, y = batch()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return F.cross_entropy(out.detach().float().requires_grad_(), y)

    train(watch, net(), loss=loss)


def of_a_copy(watch: Watch) -> None:
    model = net()
    train(watch, model, SGD(copy.deepcopy(model).parameters(), 0.1), clear=lambda _, __: None)


def loss_times_zero(watch: Watch) -> None:
    train(watch, net(), loss=lambda model: 0.0 * loss_of(model) + 1.0)


def rounded_away(watch: Watch) -> None:
    model = net()
    for each in model.parameters():
        nn.init.uniform_(each, 0.5, 1.0)
    train(watch, model, SGD(model.parameters(), 1e-14))


def no_rate(watch: Watch) -> None:
    train(watch, net(), steps=40, schedule=lambda step: float(step // 100))


STILL: dict[Program, str] = {
    zeroed: "zero or gone",
    zeroed_under_weight_decay: "zero or gone",
    cleared_too_early: "zero or gone",
    zeroed_once_unscaled: "zero or gone",
    frozen: "(2.weight, 2.bias) have requires_grad=False",
    detached: "No gradient reached the optimizer's 4 parameters",
    of_a_copy: "holds other parameters than the watched model's 4 parameters",
    loss_times_zero: "exactly zero",
    rounded_away: "to the last bit",
    no_rate: "The learning rate was exactly zero in all of the 40 steps",
}

# -- gradients that are never cleared ---------------------------------------------------------------------------------


def never(_: torch.optim.Optimizer, __: int) -> None:
    pass


def never_cleared(watch: Watch) -> None:
    train(watch, net(), clear=never)


def never_cleared_in_many_steps(watch: Watch) -> None:
    model = net()
    train(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), steps=40, clear=never)


# -- mixed precision without effect -----------------------------------------------------------------------------------


def for_cuda(watch: Watch, *, enabled: bool = True, half: bool = False) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, that it has switched them off
        model, scaler = net(), torch.amp.GradScaler("cuda", enabled=enabled)
        optimizer = SGD(model.parameters(), 0.1)
        watch(model, scaler)
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16, enabled=enabled):
                loss = loss_of(model, half=half)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def scaled(watch: Watch, forward: Callable[[nn.Module, Tensor], Tensor], *, enabled: bool = True) -> None:
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=16.0, enabled=enabled)
    optimizer = SGD(model.parameters(), 0.1)
    watch(model, scaler)
    for _ in range(4):
        optimizer.zero_grad()
        x, y = batch()
        scaler.scale(F.cross_entropy(forward(model, x).float(), y)).backward()
        scaler.step(optimizer)
        scaler.update()


def switched_off(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16, enabled=False):
        return model(x)


def around_nothing(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    with torch.autocast("cpu", torch.float16):
        return out * 2


class Norm(nn.Module):
    """A model of which autocast casts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).exp().clamp(max=20.0)


def of_norms(watch: Watch) -> None:
    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(torch.randn(4, 8)).mean()

    train(watch, Norm(), loss=loss)


NO_HALF: dict[Program, str] = {
    for_cuda: "for CUDA, which is not available: torch has switched the region off, and so is the GradScaler",
    lambda watch: scaled(watch, switched_off): "No op of the model ran inside an autocast region that is on",
    lambda watch: scaled(watch, around_nothing): "No op of the model ran inside an autocast region that is on",
    of_norms: "inside the autocast region autocast casts nothing",
}


Diagnosed = Callable[[Program], Diagnosis]


@pytest.mark.parametrize(("program", "words"), STILL.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_what_trains_nothing_is_told(diagnosed: Diagnosed, program: Program, words: str) -> None:
    found = diagnosed(program).primary
    assert found is not None
    assert found.cause is Cause.NOTHING_TRAINS
    assert words in found.explanation
    assert found.source is not None
    assert "step(" in found.source.code


@pytest.mark.parametrize("program", [never_cleared, never_cleared_in_many_steps])
def test_gradients_that_nobody_clears_are_told(diagnosed: Diagnosed, program: Program) -> None:
    assert [each.cause for each in diagnosed(program).findings] == [Cause.GRADIENTS_NOT_CLEARED]


@pytest.mark.parametrize(("program", "words"), NO_HALF.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_mixed_precision_without_effect_is_told(diagnosed: Diagnosed, program: Program, words: str) -> None:
    (found,) = diagnosed(program).findings
    assert (found.cause, found.severity) == (Cause.AMP_WITHOUT_EFFECT, Severity.WARNING)
    assert words in found.explanation
    assert "none ran in half precision: 100% in float32" in found.explanation


# -- the healthy twins ------------------------------------------------------------------------------------------------


def frozen_tower(watch: Watch) -> None:
    model = net()
    model[0].requires_grad_(False)
    train(watch, model)


class Adapted(nn.Module):
    """A frozen layer with an adapter whose second matrix is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapter(watch: Watch) -> None:
    model = Adapted()
    train(watch, model, torch.optim.AdamW([*model.down.parameters(), *model.up.parameters()], 1e-2))


def unequal_turns(watch: Watch) -> None:
    one, other = nn.Linear(4, 8), nn.Linear(8, 1)
    first, second = torch.optim.Adam(one.parameters(), 1e-3), torch.optim.Adam(other.parameters(), 1e-3)
    watch([one, other])
    for step in range(24):
        second.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = other(one(torch.randn(4, 4)).detach()).float().sigmoid().mean()
        loss.backward()
        second.step()
        if step % 5 == 4:
            first.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = -other(one(torch.randn(4, 4))).float().sigmoid().mean()
            loss.backward()
            first.step()


def an_adversary_that_waits(watch: Watch) -> None:
    """Its loss is multiplied by zero at first, as VQGAN's is."""
    one, other = net(), nn.Linear(3, 1)
    first, second = SGD(one.parameters(), 0.1), SGD(other.parameters(), 0.1)
    watch([one, other])
    for _ in range(12):
        first.zero_grad()
        loss_of(one).backward()
        first.step()
        second.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = 0.0 * other(one(batch()[0]).detach()).float().mean() + 1.0
        loss.backward()
        second.step()


def warm_up(watch: Watch) -> None:
    train(watch, net(), steps=30, schedule=lambda step: 0.01 * max(0, step - 10))


def schedule_to_zero(watch: Watch) -> None:
    train(watch, net(), steps=70, schedule=lambda step: max(0.0, 0.1 * (1 - step / 58)))


def rate_finder(watch: Watch) -> None:
    train(watch, net(), steps=24, schedule=lambda step: 1e-9 * 2.0**step)


class Experts(nn.Module):
    """Every batch goes to the first expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.experts[0](x)
        return first


def idle_experts(watch: Watch) -> None:
    train(watch, Experts())


def advantages_of_zero(watch: Watch) -> None:
    """Every answer has the same reward at first, and the loss is a constant besides."""
    rewards = iter(range(20))

    def loss(model: nn.Module) -> Tensor:
        return loss_of(model) * float(next(rewards) >= 11) + 0.5

    train(watch, net(), steps=20, loss=loss)


def nothing_to_reward(watch: Watch) -> None:
    train(watch, net(), steps=12, loss=lambda model: 0.0 * loss_of(model))


def cleared_now_and_then(watch: Watch) -> None:
    """Each micro-batch makes a step with the sum so far."""
    train(watch, net(), steps=24, clear=lambda optimizer, step: step % 6 or optimizer.zero_grad())


def accumulated(watch: Watch) -> None:
    model = net()
    optimizer = SGD(model.parameters(), 0.1)
    watch(model)
    for step in range(36):
        (loss_of(model) / 4).backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def to_zeros(watch: Watch) -> None:
    train(watch, net(), clear=lambda optimizer, _: optimizer.zero_grad(set_to_none=False))


def through_data(watch: Watch) -> None:
    """As old tutorials do: no change counter tells."""

    def clear(optimizer: torch.optim.Optimizer, _: int) -> None:
        for each in optimizer.param_groups[0]["params"]:
            if each.grad is not None:
                each.grad.data.zero_()

    train(watch, net(), steps=40, clear=clear)


def gradients_as_momentum(watch: Watch) -> None:
    """What is left of the gradient of the step before is meant to be there."""
    model = net()
    optimizer = SGD(model.parameters(), 0.02)
    watch(model)
    for _ in range(20):
        for each in gradients(model):
            each.mul_(0.5)
        loss_of(model).backward()
        optimizer.step()


def unfrozen_late(watch: Watch) -> None:
    model = net().requires_grad_(False)
    model[0].requires_grad_(True)

    def edit(_: nn.Module, step: int) -> None:
        model[2].requires_grad_(step >= 10)

    train(watch, model, SGD(model[2].parameters(), 0.1), steps=20, edit=edit)


class Tied(nn.Module):
    """One matrix there and back."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = nn.Linear(8, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.back.weight = nn.Parameter(self.there.weight[:, :3].detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.back(self.there(x))
        return out + F.linear(x, self.there.weight)


def tied(watch: Watch) -> None:
    train(watch, Tied())


def few_steps(watch: Watch) -> None:
    train(watch, net(), steps=5, edit=times_zero)


def evaluated_only(watch: Watch) -> None:
    model = net().eval()
    watch(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(10):
            model(batch()[0])


def average_and_teacher(watch: Watch) -> None:
    model = net()
    teacher = copy.deepcopy(model).requires_grad_(False)

    def edit(_: nn.Module, __: int) -> None:
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)

    optimizer = SGD([*model.parameters(), *teacher.parameters()], 0.1)
    train(watch, nn.ModuleList([model, teacher]), optimizer, loss=lambda _: loss_of(model), edit=edit)


def weights_put_back(watch: Watch) -> None:
    """Adapts to each batch, and begins again from the same weights."""
    model = net()
    start = copy.deepcopy(model.state_dict())
    train(watch, model, clear=lambda optimizer, _: (model.load_state_dict(start), optimizer.zero_grad()))


def surgery(watch: Watch) -> None:
    """Gradients of two tasks are put together by hand."""
    model = net()
    weights = list(model.parameters())
    optimizer = SGD(weights, 0.1)
    watch(model)
    for _ in range(12):
        both = [torch.autograd.grad(loss_of(model), weights) for _ in range(2)]
        for weight, one, other in zip(weights, *both, strict=True):
            weight.grad = one + other - (one * other).sum().clamp(max=0.0) * one / (one.norm() ** 2 + 1e-6)
        optimizer.step()


def image_of_a_frozen_model(watch: Watch) -> None:
    """The model's gradients are left over: it is the image that is optimised."""
    model, image = net(), nn.Parameter(torch.randn(8, 8))
    optimizer = SGD([image], 0.1)
    watch(model)
    for _ in range(12):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(image)
        out.float().mean().backward()
        optimizer.step()


class Parts(nn.Module):
    """A float32 region beside one in half."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = net()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            first = self.parts[0](x)
            with torch.autocast("cpu", enabled=False):
                out: Tensor = self.parts[2](first.float().relu())
        return out


def half_beside_float32(watch: Watch) -> None:
    train(watch, Parts(), loss=plain)


def plain(model: nn.Module) -> Tensor:
    x, y = batch()
    return F.cross_entropy(model(x).float(), y)


def wholly_bfloat16(watch: Watch) -> None:
    def loss(model: nn.Module) -> Tensor:
        x, y = batch()
        return F.cross_entropy(model(x.bfloat16()).float(), y)

    train(watch, net().bfloat16(), loss=loss)


HEALTHY: list[Program] = [
    frozen_tower,
    adapter,
    unequal_turns,
    an_adversary_that_waits,
    warm_up,
    schedule_to_zero,
    rate_finder,
    idle_experts,
    advantages_of_zero,
    nothing_to_reward,
    cleared_now_and_then,
    accumulated,
    to_zeros,
    through_data,
    gradients_as_momentum,
    unfrozen_late,
    tied,
    few_steps,
    average_and_teacher,
    weights_put_back,
    surgery,
    half_beside_float32,
    wholly_bfloat16,
]


@pytest.mark.parametrize("program", HEALTHY)
def test_a_twin_that_means_it_is_healthy(diagnosed: Diagnosed, program: Program) -> None:
    told = diagnosed(program)
    assert told.verdict is Verdict.HEALTHY, told.summary
    assert told.findings == ()


@pytest.mark.parametrize("program", [evaluated_only, image_of_a_frozen_model])
def test_of_a_run_without_a_step_nothing_is_said(diagnosed: Diagnosed, program: Program) -> None:
    assert diagnosed(program).verdict is Verdict.NOT_OBSERVED


SWITCHES_OFF: list[Program] = [
    lambda watch: for_cuda(watch, enabled=False),
    lambda watch: for_cuda(watch, half=True),
    lambda watch: scaled(watch, switched_off, enabled=False),
    lambda watch: train(watch, net(), loss=plain),
]


@pytest.mark.parametrize("program", SWITCHES_OFF, ids=["cuda", "cpu inside", "cpu", "nothing asked"])
def test_a_switch_that_is_off_is_no_fault(diagnosed: Diagnosed, program: Program) -> None:
    assert diagnosed(program).findings == ()
