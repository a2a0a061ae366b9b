"""Overflows that the code takes for numbers: told with what hid them where they matter, and else left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampscope
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.capture.changes.replay_change import ReplayChange
from ampscope.capture.checks.lost_gradients import Progress
from ampscope.capture.rerun.engine import LookDepth, Ran, Rerun, RerunEngine
from ampscope.trace.vocabulary import Cause, Verdict

ROWS, WIDTH, CLASSES = 8, 32, 4
LOUD = 3e4
Guard = Callable[[Tensor], Tensor]


class Loud(nn.Module):
    """A layer whose products leave float16 under some gain, and what guards them."""

    def __init__(self, guard: Guard, gain: float = LOUD) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.fc.weight.data *= 20.0
        self.guard = guard
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return self.guard(self.fc(x * self.gain))


class Net(nn.Module):
    def __init__(self, loud: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.loud = loud
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.loud(F.relu(self.first(x))))
        return out


def trained(
    guard: Guard, folder: Path | None, *, steps: int = 3, gain: float = LOUD, model: nn.Module | None = None
) -> list[Tensor]:
    """Weights after a short training in float16, watched where a folder is given."""
    torch.manual_seed(0)
    model = model or Net(Loud(guard, gain))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scope = ampscope.watch(model, scaler, dir=folder, quiet=True) if folder is not None else None
    for _ in range(steps):
        x, labels = torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x).float(), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    if scope is not None:
        scope.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def diagnosed(guard: Guard, folder: Path) -> Diagnosis:
    trained(guard, folder)
    return ampscope.diagnose(folder)


def by_hand(x: Tensor) -> Tensor:
    x = x.clone()
    x[torch.isinf(x)] = 0.0
    return x / LOUD


def where_needed(x: Tensor) -> Tensor:
    return x.clamp(-6e4, 6e4) / LOUD if torch.isinf(x).any() else x / LOUD


CODES = 3.0 * torch.sin(torch.arange(WIDTH * CLASSES)).view(CLASSES, WIDTH)


def nearest(x: Tensor) -> Tensor:
    """The nearest of some codes, which of distances that are all infinite is the first."""
    return CODES[(x.unsqueeze(1) - CODES * LOUD).abs().sum(-1).argmin(1)]


HIDING: dict[str, tuple[Guard, str]] = {
    "the largest number": (lambda x: torch.nan_to_num(x) / LOUD, "nan_to_num"),
    "zero": (lambda x: torch.where(torch.isfinite(x), x, torch.zeros_like(x)) / LOUD, "where"),
    "a filled mask": (lambda x: x.masked_fill(~torch.isfinite(x), 0.0) / LOUD, "masked_fill"),
    "the bounds of the dtype": (
        lambda x: x.clamp(torch.finfo(x.dtype).min, torch.finfo(x.dtype).max) / LOUD,
        "clamp",
    ),
    "an assignment": (by_hand, "index_put"),
    "a guard that float32 does without": (where_needed, "clamp"),
    "a choice": (nearest, "argmin"),
    "a NaN made of it": (lambda x: torch.nan_to_num(x - x.mean(-1, keepdim=True), 0.0, 0.0, 0.0) / LOUD, "nan_to_num"),
}


@pytest.mark.parametrize("name", HIDING)
def test_it_is_told_where_it_overflowed_and_where_it_was_hidden(name: str, run_folder: Path) -> None:
    guard, op = HIDING[name]
    primary = diagnosed(guard, run_folder).primary
    assert isinstance(primary, Incident)
    assert (primary.cause, primary.step) == (Cause.FP16_OVERFLOW, 0)
    assert (primary.module, primary.op, primary.replay) == ("loud.fc", "aten.addmm.default", "exact")
    assert f" {op} at test_hidden_overflow.py:" in primary.explanation
    assert "The same step in float32 has gradients that differ by" in primary.explanation
    assert primary.path[0].op == "aten.addmm.default"


def test_float32_where_it_was_hidden_is_a_cure_that_was_tried(run_folder: Path) -> None:
    primary = diagnosed(lambda x: torch.nan_to_num(x) / LOUD, run_folder).primary
    assert isinstance(primary, Incident)
    assert (("loud", "loud.fc"), "finite") in [(each.modules, each.outcome) for each in primary.tried]


def test_a_loss_that_was_guarded_is_told_also_where_its_gradients_do_not_fit_the_scale(run_folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    with ampscope.watch(model, scaler, dir=run_folder, quiet=True):
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = torch.nan_to_num(model(torch.randn(ROWS, WIDTH) * 1e3).half().square().mean(), 0.0, 0.0, 0.0)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    primary = ampscope.diagnose(run_folder).primary
    assert isinstance(primary, Incident)
    assert (primary.cause, primary.op, primary.step) == (Cause.FP16_OVERFLOW, "aten.pow.Tensor_Scalar", 0)
    assert "nan_to_num" in primary.explanation


HARMLESS: dict[str, Guard] = {
    "a bound": lambda x: x.clamp(-10.0, 10.0),
    "a function that saturates": F.hardtanh,
    "a metric": lambda x: (torch.tanh(x), torch.nan_to_num(x.detach()).amax())[0],
    "a choice that nothing uses": lambda x: (torch.tanh(x), x.argmax(-1))[0],
    "what is masked anyway": lambda x: torch.where(torch.arange(WIDTH) < 0, x, torch.ones_like(x)),
    "a mask of -inf": lambda x: torch.tanh(x).masked_fill(torch.arange(WIDTH) % 2 == 0, -torch.inf).softmax(-1),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_its_harmless_twin_is_not_told(name: str, run_folder: Path) -> None:
    diagnosis = diagnosed(HARMLESS[name], run_folder)
    assert diagnosis.verdict is Verdict.HEALTHY, diagnosis.summary


@pytest.mark.parametrize(("gain", "often"), [(1.0, 0), (LOUD, 2)], ids=["no overflow", "a harmless one"])
def test_a_step_is_run_again_for_an_overflow_alone_and_once(
    gain: float, often: int, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[ReplayChange] = []
    real = RerunEngine.run

    def counted(engine: RerunEngine, rerun: Rerun) -> Ran:
        if rerun.look is LookDepth.FULL:
            runs.append(rerun.change)
        return real(engine, rerun)

    monkeypatch.setattr(RerunEngine, "run", counted)
    trained(HARMLESS["a mask of -inf"], run_folder, gain=gain)
    assert len(runs) == often


@pytest.mark.parametrize("guard", [HIDING["zero"][0], HARMLESS["a bound"]], ids=["told", "harmless"])
def test_training_keeps_its_bits(guard: Guard, run_folder: Path) -> None:
    pairs = zip(trained(guard, None), trained(guard, run_folder), strict=True)
    assert all(torch.equal(alone, watched) for alone, watched in pairs)


class Energies(nn.Module):
    """Whose own forward scales its features by their energies, which leave float16.

    Args:
        harm: What keeps the scale at 1 within rounding where it is 0.
    """

    def __init__(self, harm: float) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)
        self.harm = harm

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        energies = torch.nan_to_num((h * 1000.0).square())
        scale = 1.0 + self.harm * energies.float().mean(-1, keepdim=True) / 1e5
        out: Tensor = self.last(h) * scale
        return out


class Within(nn.Module):
    """A model that is all of another one."""

    def __init__(self, all_of_it: nn.Module) -> None:
        super().__init__()
        self.all_of_it = all_of_it

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.all_of_it(x)
        return out


def taught(model: nn.Module, folder: Path) -> Diagnosis:
    """The diagnosis of a student that starts so near to its teacher that half precision rounds all that is left."""
    teacher = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.0 + 1e-4 * torch.randn_like(parameter))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with ampscope.watch(model, scaler, dir=folder, quiet=True):
        for _ in range(2):
            x = torch.randn(64, WIDTH)
            with torch.no_grad():
                wanted = teacher(x)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.mse_loss(model(x).float(), wanted)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return ampscope.diagnose(folder)


@pytest.mark.parametrize("within", [False, True], ids=["the model itself", "a module that holds the model"])
def test_a_model_that_overflows_in_its_own_forward_is_told(within: bool, run_folder: Path) -> None:
    torch.manual_seed(0)
    model = Energies(harm=1.0)
    trained(F.relu, run_folder, model=Within(model) if within else model)
    primary = ampscope.diagnose(run_folder).primary
    assert isinstance(primary, Incident)
    assert (primary.cause, primary.op) == (Cause.FP16_OVERFLOW, "aten.pow.Tensor_Scalar")
    assert primary.module == ("all_of_it" if within else "")


@pytest.mark.parametrize("within", [False, True], ids=["the model itself", "a module that holds the model"])
def test_rounding_of_what_little_is_left_to_learn_is_not_laid_on_an_overflow(within: bool, run_folder: Path) -> None:
    torch.manual_seed(0)
    model = Energies(harm=1e-7)
    diagnosis = taught(Within(model) if within else model, run_folder)
    assert diagnosis.verdict is Verdict.HEALTHY, diagnosis.summary


def test_where_the_trial_cannot_be_run_nothing_is_told(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = RerunEngine.run

    def out_of_memory(engine: RerunEngine, rerun: Rerun) -> Ran:
        return real(engine, rerun) if rerun.look is LookDepth.FULL else Ran(reason="out of memory")

    monkeypatch.setattr(RerunEngine, "run", out_of_memory)
    diagnosis = diagnosed(HIDING["the largest number"][0], run_folder)
    assert diagnosis.verdict is Verdict.HEALTHY, diagnosis.summary


def test_a_training_that_has_come_to_its_end_is_left_alone(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Progress, "has_ended", lambda *_: True)
    diagnosis = diagnosed(HIDING["the largest number"][0], run_folder)
    assert diagnosis.verdict is Verdict.HEALTHY, diagnosis.summary


class Noisy(nn.Module):
    """Noise from numbers that float16 rounds to the ends of their range, where it is infinite: a chance of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.book = nn.Linear(WIDTH, 1024), nn.Linear(1024, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.codes(x)
        noise = -torch.log(-torch.log(torch.rand(logits.shape, dtype=torch.float16)))
        out: Tensor = self.book((logits + noise).softmax(-1))
        return out


def test_noise_that_is_infinite_in_float32_too_is_no_overflow(run_folder: Path) -> None:
    trained(HIDING["zero"][0], run_folder, steps=6, model=Net(Noisy()))
    found = ampscope.diagnose(run_folder)
    assert (found.verdict, found.primary) == (Verdict.HEALTHY, None)


def test_an_overflow_beside_such_noise_is_told(run_folder: Path) -> None:
    guard, _ = HIDING["zero"]
    torch.manual_seed(0)
    trained(guard, run_folder, model=Net(nn.Sequential(Loud(guard), Noisy())))
    primary = ampscope.diagnose(run_folder).primary
    assert isinstance(primary, Incident)
    assert (primary.module, primary.cause) == ("loud.0.fc", Cause.FP16_OVERFLOW)
