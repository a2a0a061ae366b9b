"""The second look at good steps: what is run again, how often, and that training keeps its bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampscope
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.capture.changes.replay_change import EverythingIn, ReplayChange
from ampscope.capture.checks import lost_gradients
from ampscope.capture.checks.second_look import SecondLook
from ampscope.capture.isolation import memory
from ampscope.capture.rerun.engine import Ran, Rerun, RerunEngine
from ampscope.capture.torch_support.models import Models
from ampscope.trace.vocabulary import Cause, Verdict

ROWS, WIDTH = 8, 6


class Gate(nn.Module):
    """A sigmoid whose operand is moved."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, h: Tensor) -> Tensor:
        return (h + self.shift).sigmoid()


def network(middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, 1))


def trained(
    model: nn.Module,
    folder: Path | None,
    *,
    steps: int = 4,
    dtype: torch.dtype = torch.float16,
    edit: Callable[[nn.Module], object] = lambda _: None,
    lr: float = 0.1,
) -> tuple[list[float], list[Tensor]]:
    """Losses and weights of a short training, watched where a folder is given."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=dtype is torch.float16)
    scope = ampscope.watch(model, scaler, dir=folder, quiet=True) if folder is not None else None
    losses = []
    for _ in range(steps):
        x = torch.randn(ROWS, WIDTH)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            loss = F.mse_loss(F.dropout(model(x), 0.2).float(), x[:, :1])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        edit(model)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    if scope is not None:
        scope.close()
    return [*losses, float(torch.rand(()))], [p.detach().clone() for p in model.parameters()]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[type[ReplayChange]]]:
    """What was run again, in order."""
    seen: list[type[ReplayChange]] = []
    real = RerunEngine.run

    def counted(engine: RerunEngine, rerun: Rerun) -> Ran:
        seen.append(type(rerun.change))
        return real(engine, rerun)

    monkeypatch.setattr(RerunEngine, "run", counted)
    return iter([seen])


def test_an_ordinary_step_is_not_run_again(run_folder: Path, looks: Iterator[list[type[ReplayChange]]]) -> None:
    trained(network(nn.GELU()), run_folder)
    assert next(looks) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_float32_has_too_is_looked_at_once(
    run_folder: Path, looks: Iterator[list[type[ReplayChange]]], dtype: torch.dtype
) -> None:
    model = network(nn.ReLU())
    with torch.no_grad():
        model.get_parameter("0.bias")[:3] = -50.0
    trained(model, run_folder, steps=12, dtype=dtype)
    assert next(looks) == [EverythingIn]
    assert ampscope.diagnose(run_folder).verdict is Verdict.HEALTHY


def test_float32_is_never_looked_at(run_folder: Path, looks: Iterator[list[type[ReplayChange]]]) -> None:
    trained(network(Gate(200.0)), run_folder, dtype=torch.float32)
    assert next(looks) == []


def test_a_loss_that_is_told_is_not_told_at_every_step(run_folder: Path) -> None:
    trained(network(Gate(12.0)), run_folder, steps=12)
    diagnosis = ampscope.diagnose(run_folder)
    assert [(each.cause, each.step, each.count) for each in diagnosis.incidents] == [(Cause.STAGNATION, 0, 1)]


@pytest.mark.parametrize("middle", [Gate(12.0), nn.ReLU()], ids=["lost", "whole"])
def test_training_keeps_its_bits(run_folder: Path, middle: nn.Module) -> None:
    alone, with_look = trained(network(middle), None), trained(network(middle), run_folder)
    assert alone[0] == with_look[0]
    assert all(torch.equal(mine, other) for mine, other in zip(alone[1], with_look[1], strict=True))


def _half_of_it(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.view(-1)[::2] = 0.0


def _much_smaller(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-6)


@pytest.mark.parametrize("edit", [_half_of_it, _much_smaller])
def test_what_the_loop_takes_from_gradients_is_no_loss(run_folder: Path, edit: Callable[[nn.Module], object]) -> None:
    trained(network(nn.GELU()), run_folder, edit=edit)
    assert ampscope.diagnose(run_folder).primary is None


@pytest.mark.parametrize(("units", "runs"), [(0, []), (3, [EverythingIn])], ids=["whole", "half of it dead"])
def test_clipping_makes_no_look_and_no_look_longer(
    units: int, runs: list[type[ReplayChange]], run_folder: Path, looks: Iterator[list[type[ReplayChange]]]
) -> None:
    model = network(nn.ReLU() if units else nn.GELU())
    with torch.no_grad():
        model.get_parameter("0.bias")[:units] = -50.0
    trained(model, run_folder, steps=12, edit=_much_smaller)
    assert next(looks) == runs


def test_a_loss_is_told_beside_clipping(run_folder: Path) -> None:
    trained(network(Gate(12.0)), run_folder, edit=_much_smaller)
    found = ampscope.diagnose(run_folder).primary
    assert isinstance(found, Incident)
    assert (found.cause, found.step) == (Cause.STAGNATION, 0)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Models]:
    """The measurements of gradients as backward has left them."""
    seen: list[Models] = []
    real = lost_gradients.Largest.__init__

    def counted(self: lost_gradients.Largest, models: Models) -> None:
        seen.append(models)
        real(self, models)

    monkeypatch.setattr(lost_gradients.Largest, "__init__", counted)
    return seen


def test_an_optimizer_that_rests_has_no_backward_measured(run_folder: Path, measured: list[Models]) -> None:
    model = network(nn.GELU())
    rests, works = (torch.optim.SGD(part.parameters()) for part in (model.get_submodule("0"), model.get_submodule("2")))
    with ampscope.watch(model, dir=run_folder, quiet=True):
        for step in range(40):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.randn(ROWS, WIDTH)).float().square().mean()
            loss.backward()
            if step < 3:
                rests.step()
            works.step()
    assert len(measured) == 8 + 3  # at the first steps, of both at once, and at the 8th, 16th and 32nd


def test_backwards_that_no_step_follows_are_not_measured_for_ever(run_folder: Path, measured: list[Models]) -> None:
    model = network(nn.GELU())
    with ampscope.watch(model, dir=run_folder, quiet=True):
        for _ in range(40):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.randn(ROWS, WIDTH)).float().square().mean()
            loss.backward()
    assert len(measured) == 16


def _suspicious(
    optimizer: torch.optim.Optimizer, model: nn.Module, scale: float, dtype: torch.dtype = torch.float16
) -> dict[str, lost_gradients.Sign]:
    measured = lost_gradients.Signs(optimizer, Models([model]), torch.tensor(scale), None, scaled=False)
    assert measured.scale == scale
    return measured.suspicious([dtype])


def test_rows_that_a_batch_does_not_mention_are_no_sign() -> None:
    looked_up = nn.Embedding(50, 4)
    model = nn.Sequential(looked_up, nn.Linear(4, 1))
    model(torch.tensor([1, 2])).sum().backward()
    optimizer = torch.optim.SGD(model.parameters())
    assert _suspicious(optimizer, model, 1.0) == {}
    looked_up.weight.grad = torch.zeros(50, 4)
    assert _suspicious(optimizer, model, 1.0)["0.weight"].zeros == 1.0


def test_gradients_that_float16_hardly_holds_are_a_sign() -> None:
    model = nn.Linear(2, 1)
    model(torch.full((1, 2), 1e-6)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters())
    assert set(_suspicious(optimizer, model, 1.0)) == {"weight"}
    assert _suspicious(optimizer, model, 1024.0) == {}
    assert _suspicious(optimizer, model, 1.0, torch.bfloat16) == {}


@pytest.mark.parametrize(
    ("half", "share"),
    [([1.0, 2.0, 0.0], 0.25), ([0.0, 0.0, 0.0], 1.0), ([0.6, 1.2, 0.6], 0.4), ([1.0, 2.0, 0.95], None)],
)
def test_the_missing_share_is_that_of_the_mass(half: list[float], share: float | None) -> None:
    found = lost_gradients.lost_shares({"w": torch.tensor(half)}, {"w": torch.tensor([1.0, 2.0, 1.0])})
    assert found.get("w") == (pytest.approx(share) if share is not None else None)


def counted(folder: Path, weights: Callable[[int], Tensor], *, steps: int = 13) -> Diagnosis:
    """Trains with a weighted loss; the weights are computed anew in each step."""
    model = network(nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with ampscope.watch(model, scaler, dir=folder, quiet=True):
        for step in range(steps):
            x = torch.randn(ROWS, WIDTH)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(x)
            loss = (weights(step) * (out.float() - 1).square()).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return ampscope.diagnose(folder)


def test_a_loss_that_an_infinity_made_zero_is_told_at_the_infinity(run_folder: Path) -> None:
    seen = torch.full((4,), 15_000.0, dtype=torch.float16)

    def by_frequency(step: int) -> Tensor:
        seen.add_(128)
        return (seen / seen.sum()).float().sum()

    found = counted(run_folder, by_frequency).primary
    assert isinstance(found, Incident)
    assert (found.cause, found.op, found.step) == (Cause.FP16_OVERFLOW, "aten.sum.default", 10)


@pytest.mark.parametrize("from_step", [5, 10])
def test_a_loss_that_is_zero_in_float32_too_is_looked_at_once(
    from_step: int, run_folder: Path, looks: Iterator[list[type[ReplayChange]]]
) -> None:
    diagnosis = counted(run_folder, lambda step: torch.tensor(float(step < from_step)))
    assert diagnosis.verdict is Verdict.HEALTHY
    assert next(looks) == [EverythingIn]


class Late(nn.Module):
    """Some units die at one step, and a sigmoid is driven into saturation at a later one."""

    def __init__(self, dies: int, saturates: int) -> None:
        super().__init__()
        self.dies, self.saturates, self.calls = dies, saturates, 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        alive = torch.ones(WIDTH, dtype=h.dtype)
        alive[:3] = float(self.calls <= self.dies)
        return (h * alive + (12.0 if self.calls > self.saturates else 0.0)).sigmoid()


@pytest.mark.parametrize(("dies", "saturates", "told"), [(1000, 40, 50), (145, 155, 250)])
def test_a_loss_that_begins_late_is_told_soon(dies: int, saturates: int, told: int, run_folder: Path) -> None:
    trained(network(Late(dies, saturates)), run_folder, steps=told + 1)
    found = ampscope.diagnose(run_folder).primary
    assert isinstance(found, Incident)
    assert (found.cause, found.step) == (Cause.STAGNATION, told)


def test_no_step_is_run_in_float32_where_memory_is_short(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(memory, "_free", lambda _: 64)
    monkeypatch.setattr(SecondLook, "_confirmed", lambda *_: ran.append("float32"))
    alone, watched = trained(network(Gate(12.0)), None), trained(network(Gate(12.0)), run_folder)
    assert (alone[0], ran) == (watched[0], [])
    assert ampscope.diagnose(run_folder).incidents == ()
