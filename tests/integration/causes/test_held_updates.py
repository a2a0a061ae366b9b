"""Single weights and optimizer state that half precision holds in place are told, and their harmless twins are not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampscope
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.trace.schema import Trigger
from ampscope.trace.vocabulary import Cause, Verdict

BF16 = torch.bfloat16


class Gained(nn.Module):
    """A classifier with a norm, whose gain begins at 1, where bfloat16 is coarse."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.norm = nn.RMSNorm(32)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.body(x).to(self.norm.weight.dtype))))


Optimizers = Callable[[Gained], torch.optim.Optimizer]
#: What the loop does with a model before its optimizer steps, and after; given the number of the step.
Edit = Callable[[Gained, int], None]


def small(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def large(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=2e-2)


def without_the_gain(model: Gained) -> torch.optim.Optimizer:
    others = [p for p in model.parameters() if p is not model.norm.weight]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": [model.norm.weight], "lr": 0.0}]
    return torch.optim.Adam(groups, lr=1e-3)


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


class Compensated(torch.optim.Optimizer):
    """Kahan's sum: what a weight could not take yet is kept, and written as soon as it is a spacing."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # no closure
        for group in self.param_groups:
            for weight in group["params"]:
                rest = self.state[weight].setdefault("rest", torch.zeros_like(weight))
                rest.sub_(weight.grad, alpha=group["lr"])
                before = weight.clone()
                weight.add_(rest)
                rest.add_(before - weight)


class Mastered(torch.optim.Optimizer):
    """Keeps float32 weights of its own, and rounds those into the model's."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # no closure
        for group in self.param_groups:
            for weight in group["params"]:
                master = self.state[weight].setdefault("master", weight.float())
                master.sub_(weight.grad.float(), alpha=group["lr"])
                weight.copy_(master)


def compensated(model: nn.Module) -> torch.optim.Optimizer:
    return Compensated(model.parameters(), lr=1e-3)


def hardly_compensated(model: nn.Module) -> torch.optim.Optimizer:
    return Compensated(model.parameters(), lr=1e-5)


def gentle(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RAdam(model.parameters(), lr=1e-2)


def mastered(model: nn.Module) -> torch.optim.Optimizer:
    return Mastered(model.parameters(), lr=1e-3)


def nothing(_: Gained, __: int) -> None:
    pass


def gain_without_gradient(model: Gained, _: int) -> None:
    assert model.norm.weight.grad is not None
    model.norm.weight.grad.zero_()


def now_and_then(model: Gained, step: int) -> None:
    """What rounding by chance does: most updates are lost, and some are a whole spacing."""
    with torch.no_grad():
        model.norm.weight[step % 8 :: 8] -= 2**-8


def trained(
    optimizer_of: Optimizers,
    folder: Path,
    *,
    gain: torch.dtype = BF16,
    before: Edit = nothing,
    after: Edit = nothing,
    warm_up: bool = False,
    steps: int = 100,
) -> Diagnosis:
    torch.manual_seed(0)
    model, truth = Gained().to(BF16), torch.randn(16, 4)
    model.norm.to(gain)
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / steps if warm_up else 1.0)
    with ampscope.watch(model, dir=folder, quiet=True):
        for step in range(steps):
            x = torch.randn(32, 16)
            with torch.autocast("cpu", BF16):
                loss = F.cross_entropy(model(x).float(), (x @ truth).argmax(-1))
            loss.backward()
            before(model, step)
            optimizer.step()
            after(model, step)
            optimizer.zero_grad()
            schedule.step()
    return ampscope.diagnose(folder)


def test_a_gain_that_is_held_while_all_else_moves_is_told_by_name(run_folder: Path) -> None:
    found = trained(small, run_folder).primary
    assert isinstance(found, Incident)
    assert (found.cause, found.phase, found.module, found.trigger) == (
        Cause.BF16_PRECISION,
        "optimizer",
        "norm",
        Trigger.UPDATES_LOST,
    )
    assert found.tripped == ("norm.weight",)
    assert "numbers of bfloat16 are 0.007812 apart at 1." in found.explanation
    assert found.remedies[0].text.startswith("Keep norm.weight in float32")


@pytest.mark.parametrize(
    ("optimizer_of", "settings"),
    [
        pytest.param(small, {"gain": torch.float32}, id="in float32"),
        pytest.param(large, {}, id="moves"),
        pytest.param(without_the_gain, {}, id="learning rate of zero"),
        pytest.param(small, {"before": gain_without_gradient}, id="no gradient"),
        pytest.param(decaying, {"before": gain_without_gradient}, id="decay alone"),
        pytest.param(small, {"after": now_and_then}, id="now and then"),
        pytest.param(small, {"warm_up": True}, id="warm-up"),
        pytest.param(compensated, {}, id="Kahan's sum"),
        pytest.param(mastered, {}, id="float32 weights of the optimizer's own"),
        pytest.param(hardly_compensated, {"steps": 30}, id="Kahan's sum of next to nothing"),
        pytest.param(gentle, {"steps": 30}, id="begins gently"),
    ],
)
def test_its_twin_is_quiet(optimizer_of: Optimizers, settings: dict[str, object], run_folder: Path) -> None:
    diagnosis = trained(optimizer_of, run_folder, **settings)  # type: ignore[arg-type]  # one of each name's own type
    assert diagnosis.verdict is Verdict.HEALTHY, diagnosis.summary


class Written(Compensated):
    """The same without the sum."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # no closure
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(weight.grad, alpha=group["lr"])


def written(model: nn.Module) -> torch.optim.Optimizer:
    return Written(model.parameters(), lr=1e-3)


def test_updates_that_nothing_adds_up_are_lost(run_folder: Path) -> None:
    found = trained(written, run_folder, steps=200).primary
    assert isinstance(found, Incident)
    assert found.cause is Cause.BF16_PRECISION


def only_the_gain_in_half(model: Gained) -> torch.optim.Optimizer:
    """One optimizer for what is kept in half, whose every weight then stands still."""
    model.body.float()
    model.head.float()
    return small(model)


def test_the_only_weight_in_half_is_told_once_and_by_name(run_folder: Path) -> None:
    diagnosis = trained(only_the_gain_in_half, run_folder)
    assert [(each.cause, each.tripped) for each in diagnosis.incidents] == [(Cause.BF16_PRECISION, ("norm.weight",))]


def converged(folder: Path, *, dtype: torch.dtype) -> Diagnosis:
    """Descends as far as the dtype can hold it, and stays there for long."""
    torch.manual_seed(0)
    model, x = nn.Linear(16, 1).to(dtype), torch.randn(256, 16)
    y = x @ torch.randn(16, 1) + 2 * torch.randn(256, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with ampscope.watch(model, dir=folder, quiet=True):
        for _ in range(600):
            optimizer.zero_grad()
            F.mse_loss(model(x.to(dtype)).float(), y).backward()
            optimizer.step()
    return ampscope.diagnose(folder)


def test_what_is_held_where_the_training_has_ended_is_quiet(run_folder: Path) -> None:
    assert converged(run_folder, dtype=BF16).verdict is Verdict.HEALTHY


def averaged(folder: Path, *, dtype: torch.dtype, spike: float, alpha: float = 0.997) -> Diagnosis:
    """RMSprop, whose running average of squares sees one step with far larger gradients."""
    torch.manual_seed(0)
    model, truth = nn.Linear(8, 3).to(dtype), torch.randn(8, 3)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-2, alpha=alpha)
    with ampscope.watch(model, dir=folder, quiet=True):
        for step in range(640):
            x = torch.randn(16, 8)
            loss = F.cross_entropy(model(x.to(dtype)).float(), (x @ truth).argmax(-1))
            (loss * (spike if step == 12 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return ampscope.diagnose(folder)


def test_an_average_that_cannot_decay_is_told(run_folder: Path) -> None:
    told = [each for each in averaged(run_folder, dtype=BF16, spike=1e3).incidents if "square_avg" in each.explanation]
    assert [(each.cause, each.phase, each.trigger) for each in told] == [
        (Cause.BF16_PRECISION, "optimizer", Trigger.UPDATES_LOST)
    ]
    assert "where it should come down to" in told[0].explanation


@pytest.mark.parametrize(
    ("dtype", "spike", "alpha"),
    [
        pytest.param(torch.float32, 1e3, 0.997, id="in float32"),
        pytest.param(BF16, 1.0, 0.997, id="nothing to forget"),
        pytest.param(BF16, 1e3, 0.9, id="forgets fast enough"),
    ],
)
def test_an_average_that_decays_is_quiet(dtype: torch.dtype, spike: float, alpha: float, run_folder: Path) -> None:
    found = averaged(run_folder, dtype=dtype, spike=spike, alpha=alpha)
    assert not any("square_avg" in each.explanation for each in found.incidents)
