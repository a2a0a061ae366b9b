"""Trainings in which one step stands far out, without a NaN: one of them does not get over it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampscope
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.trace.schema import ReplayStatus
from ampscope.trace.vocabulary import Cause, Severity, Verdict

STEPS, AT, ROWS = 110, 60, 32
Batches = Callable[[int], tuple[Tensor, Tensor]]
Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def usual(step: int) -> tuple[Tensor, Tensor]:
    """Pixels between 0 and 1, and a smooth function of them."""
    pixels = torch.rand(ROWS, 8)
    return pixels, torch.sin(3 * pixels).sum(1) / 4


def one_image_in_bytes(step: int) -> tuple[Tensor, Tensor]:
    pixels, wanted = usual(step)
    if step == AT:
        pixels[5] *= 255
    return pixels, wanted


def one_wrong_target(step: int) -> tuple[Tensor, Tensor]:
    pixels, wanted = usual(step)
    if step == AT:
        wanted[5] = 300.0
    return pixels, wanted


def other_units(step: int) -> tuple[Tensor, Tensor]:
    pixels, wanted = usual(step)
    return pixels, wanted * (20 if step >= AT else 1)


def another_task(step: int) -> tuple[Tensor, Tensor]:
    pixels, wanted = usual(step)
    return pixels, 10 - wanted if step >= AT else wanted


def heavy_tails(step: int) -> tuple[Tensor, Tensor]:
    pixels, wanted = usual(step)
    return pixels, wanted + 0.1 * torch.distributions.StudentT(1.5).sample((ROWS,))


def sgd(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.05)


def adam(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(weights, lr=1e-2)


def trained(
    folder: Path,
    batches: Batches,
    optimizers: Optimizers = sgd,
    *,
    dtype: torch.dtype | None = None,
    clip: float = 0.0,
    steps: int = STEPS,
) -> Diagnosis:
    """A small network trained under watch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = optimizers(list(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if dtype is torch.float16 else None
    with ampscope.watch(model, scaler, dir=folder, quiet=True):
        for step in range(steps):
            pixels, wanted = batches(step)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = F.mse_loss(model(pixels).float().squeeze(-1), wanted)
            if scaler is None:
                loss.backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                if clip:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                scaler.step(optimizer)
                scaler.update()
    return ampscope.diagnose(folder)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_batch_that_broke_the_training_is_told_with_its_row(dtype: torch.dtype | None, run_folder: Path) -> None:
    diagnosis = trained(run_folder, one_image_in_bytes, dtype=dtype)
    primary = diagnosis.primary
    assert isinstance(primary, Incident), diagnosis.summary
    assert (primary.cause, primary.severity, primary.step) == (Cause.SPIKE, Severity.WARNING, AT)
    assert (primary.op, primary.module) == ("input", "0")
    assert primary.replay == ReplayStatus.EXACT
    assert "is that of the row at index 5, of 32 rows" in primary.explanation
    assert "The loss stayed up" in primary.explanation
    assert len(diagnosis.incidents) == 1


@pytest.mark.parametrize(
    ("batches", "optimizers", "options"),
    [
        pytest.param(one_image_in_bytes, sgd, {"clip": 1.0}, id="clipped"),
        pytest.param(one_image_in_bytes, sgd, {"dtype": torch.float16}, id="skipped by the scaler"),
        pytest.param(one_wrong_target, sgd, {}, id="one wrong target"),
        pytest.param(one_wrong_target, adam, {"dtype": torch.bfloat16}, id="one wrong target with moments"),
        pytest.param(other_units, adam, {}, id="other units from now on"),
        pytest.param(another_task, sgd, {}, id="another task"),
        pytest.param(another_task, adam, {"dtype": torch.float16}, id="another task with moments"),
        pytest.param(heavy_tails, sgd, {}, id="heavy tails"),
        pytest.param(heavy_tails, adam, {}, id="heavy tails with moments"),
    ],
)
def test_a_training_that_goes_on_is_healthy(
    batches: Batches, optimizers: Optimizers, options: dict[str, object], run_folder: Path
) -> None:
    diagnosis = trained(run_folder, batches, optimizers, **options)  # type: ignore[arg-type]  # see the parameters
    assert (diagnosis.verdict, diagnosis.primary) == (Verdict.HEALTHY, None), diagnosis.summary


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_run_that_ends_soon_after_one_wrong_target_tells_it_unless_it_was_clipped(
    dtype: torch.dtype | None, clip: float, run_folder: Path
) -> None:
    def batches(step: int) -> tuple[Tensor, Tensor]:
        pixels, wanted = usual(step)
        wanted[5] = 3000.0 if step == AT else wanted[5]
        return pixels, wanted

    diagnosis = trained(run_folder, batches, adam, dtype=dtype, clip=clip, steps=AT + 15)
    if clip:
        assert (diagnosis.verdict, diagnosis.primary) == (Verdict.HEALTHY, None), diagnosis.summary
        return
    primary = diagnosis.primary
    assert isinstance(primary, Incident), diagnosis.summary
    assert (primary.cause, primary.severity, primary.step) == (Cause.SPIKE, Severity.WARNING, AT)
    assert "is that of the row at index 5, of 32 rows" in primary.explanation
    assert "14 steps follow, too few to tell" in primary.explanation


@pytest.mark.parametrize("steps", [65, 75])
def test_a_run_of_heavy_tails_that_ends_soon_after_one_is_healthy(steps: int, run_folder: Path) -> None:
    diagnosis = trained(run_folder, heavy_tails, adam, steps=steps)
    assert (diagnosis.verdict, diagnosis.primary) == (Verdict.HEALTHY, None), diagnosis.summary


def test_a_smaller_batch_is_told_with_the_spike(run_folder: Path) -> None:
    def batches(step: int) -> tuple[Tensor, Tensor]:
        pixels, wanted = usual(step)
        wanted[5] = 3000.0 if step == AT else wanted[5]
        return (pixels[:16], wanted[:16]) if step == AT else (pixels, wanted)

    diagnosis = trained(run_folder, batches, lambda weights: torch.optim.SGD(weights, lr=0.003))
    (noted,) = (each for each in diagnosis.incidents if each.cause is Cause.SPIKE)
    assert "Otherwise than before: the rows of the batch (32, now 16)." in noted.explanation


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_a_spike_that_passed_is_noted_with_what_made_it(dtype: torch.dtype | None, run_folder: Path) -> None:
    def batches(step: int) -> tuple[Tensor, Tensor]:
        pixels, wanted = usual(step)
        wanted[5] = 3000.0 if step == AT else wanted[5]
        return pixels, wanted

    diagnosis = trained(run_folder, batches, lambda weights: torch.optim.SGD(weights, lr=0.003), dtype=dtype)
    (noted,) = (each for each in diagnosis.incidents if each.cause is Cause.SPIKE)
    assert (noted.severity, noted.step, noted.replay) == (Severity.INFO, AT, ReplayStatus.EXACT)
    assert noted.explanation.startswith("The gradient norm was ")
    assert "is that of the row at index 5, of 32 rows" in noted.explanation
    assert "Of mse_loss args[1], index 5 holds" in noted.explanation
    assert noted.explanation.endswith("The training got over it.")


def test_a_run_that_blew_up_is_told_from_the_batch_that_threw_it_off(run_folder: Path) -> None:
    def batches(step: int) -> tuple[Tensor, Tensor]:
        pixels, wanted = usual(step)
        wanted[5] = 1e12 if step == AT else wanted[5]
        return pixels, wanted

    diagnosis = trained(run_folder, batches, lambda weights: torch.optim.SGD(weights, lr=0.2))
    assert isinstance(diagnosis.primary, Incident)
    assert diagnosis.primary.cause is Cause.DIVERGENCE
    assert f"It began at step {AT}." in diagnosis.primary.explanation
    assert "is that of the row at index 5, of 32 rows" in diagnosis.primary.explanation
    assert "rows of the batch" in diagnosis.primary.remedies[0].text


def gradient_alone(model: nn.Module, step: int) -> Tensor:
    """A term of the loss that is 0 throughout, and from a step on has an enormous gradient."""
    mean = next(model.parameters()).float().mean()
    return 1e5 * (mean - mean.detach()) if step >= AT else torch.zeros(())


def penalty(model: nn.Module, step: int) -> Tensor:
    """A term that joins the loss on purpose, and is what is learnt from then on."""
    return 20 * next(model.parameters()).float().pow(2).sum() if step >= AT else torch.zeros(())


def with_term(
    folder: Path, term: Callable[[nn.Module, int], Tensor], dtype: torch.dtype | None, *, clip: bool, steps: int = 120
) -> Diagnosis:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=dtype is torch.float16)
    with ampscope.watch(model, scaler, dir=folder, quiet=True):
        for step in range(steps):
            pixels, wanted = usual(step)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = F.mse_loss(model(pixels).float().squeeze(-1), wanted) + term(model, step)
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    return ampscope.diagnose(folder)


@pytest.mark.parametrize(
    ("dtype", "clip"), [(None, False), (torch.bfloat16, False), (torch.float16, False), (torch.float16, True)]
)
def test_a_gradient_norm_that_stays_up_is_told_to_the_end(
    dtype: torch.dtype | None, clip: bool, run_folder: Path
) -> None:
    diagnosis = with_term(run_folder, gradient_alone, dtype, clip=clip)
    primary = diagnosis.primary
    assert isinstance(primary, Incident), diagnosis.summary
    assert (primary.cause, primary.severity, primary.step) == (Cause.SPIKE, Severity.WARNING, AT)
    assert (primary.lasting, primary.last_step, primary.count) == (True, 119, 60)
    assert diagnosis.summary.startswith(f"Step {AT} began a lasting jump of the gradient norm.")


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_term_that_joins_the_loss_and_is_learnt_is_a_note(dtype: torch.dtype | None, run_folder: Path) -> None:
    diagnosis = with_term(run_folder, penalty, dtype, clip=False)
    assert (diagnosis.verdict, diagnosis.primary) == (Verdict.HEALTHY, None), diagnosis.summary
    (noted,) = (each for each in diagnosis.incidents if each.cause is Cause.SPIKE)
    assert (noted.severity, noted.lasting) == (Severity.INFO, True)


def test_adapters_that_begin_at_zero_are_healthy(run_folder: Path) -> None:
    torch.manual_seed(0)
    down, up = nn.Linear(8, 4, bias=False), nn.Linear(4, 1, bias=False)
    nn.init.normal_(down.weight, std=1e-3)
    nn.init.zeros_(up.weight)
    model = nn.Sequential(down, up)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with ampscope.watch(model, dir=run_folder, quiet=True):
        for step in range(120):
            pixels, wanted = usual(step)
            optimizer.zero_grad()
            F.mse_loss(model(pixels).squeeze(-1), wanted).backward()
            optimizer.step()
    diagnosis = ampscope.diagnose(run_folder)
    assert (diagnosis.verdict, diagnosis.primary) == (Verdict.HEALTHY, None), diagnosis.summary


def test_two_that_play_against_each_other_are_healthy(run_folder: Path) -> None:
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    of_maker, of_judge = (torch.optim.Adam(each.parameters(), lr=1e-2) for each in (maker, judge))
    yes, no = torch.ones(ROWS, 1), torch.zeros(ROWS, 1)
    with ampscope.watch([maker, judge], dir=run_folder, quiet=True):
        for step in range(120):
            pixels, _ = usual(step)
            made = maker(torch.randn(ROWS, 4)) * (1 if step < AT else 1000)
            of_judge.zero_grad()
            judged, real = judge(made.detach()), judge(pixels)
            loss = F.binary_cross_entropy_with_logits
            (loss(judged, no) + loss(real, yes)).backward()
            of_judge.step()
            of_maker.zero_grad()
            loss(judge(made), yes).backward()
            of_maker.step()
    diagnosis = ampscope.diagnose(run_folder)
    assert (diagnosis.verdict, diagnosis.primary) == (Verdict.HEALTHY, None), diagnosis.summary
