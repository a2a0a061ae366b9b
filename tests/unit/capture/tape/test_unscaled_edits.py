"""Gradients that the loop spoils after ``scaler.unscale_``: told at their own step, by the op and line that did it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import ampscope
from ampscope.analysis.results import Diagnosis
from ampscope.capture.events import OpenStep
from ampscope.capture.tape import unscaled_edits
from ampscope.trace.vocabulary import Cause, Verdict

WIDTH, STEPS, BAD = 6, 5, 2
Edit = Callable[[list[nn.Parameter]], object]


def trained(edit: Edit, folder: Path | None, *, parts: int = 1, fused: bool = False, bad: int = BAD) -> list[Tensor]:
    """Weights after a short training, watched where a folder is given; ``edit`` runs in the bad step alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    model.register_parameter("idle", nn.Parameter(torch.ones(3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scope = ampscope.watch(model, scaler, dir=folder, quiet=True) if folder is not None else None
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(parts):
            x = torch.randn(4, WIDTH)
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(x)
            idle = 0.0 * model.get_parameter("idle").sum()
            scaler.scale(F.mse_loss(out.float(), x[:, :1]) + idle).backward()
        scaler.unscale_(optimizer)
        if step == bad:
            edit(list(model.parameters()))
        scaler.step(optimizer)
        scaler.update()
    if scope is not None:
        scope.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def diagnosed(edit: Edit, folder: Path, **options: int) -> Diagnosis:
    trained(edit, folder, **options)  # type: ignore[arg-type]  # options of several types
    return ampscope.diagnose(folder)


def gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def in_place(parameters: list[nn.Parameter]) -> None:
    for gradient in gradients(parameters):
        gradient.div_(gradient.norm())


def through_data(parameters: list[nn.Parameter]) -> None:
    for gradient in gradients(parameters):
        gradient.data.div_(gradient.data.norm())


def assigned(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad = parameter.grad / parameter.grad.norm()


def all_at_once(parameters: list[nn.Parameter]) -> None:
    torch._foreach_div_(gradients(parameters), torch._foreach_norm(gradients(parameters)))


def by_a_factor(parameters: list[nn.Parameter]) -> None:
    norm = torch.stack([gradient.norm() for gradient in gradients(parameters)]).norm()
    factor = torch.div(norm, norm - norm)
    for gradient in gradients(parameters):
        gradient.mul_(factor)


DIVIDES = {
    "in place": (in_place, "aten.div_.Tensor"),
    "through data": (through_data, "aten.div_.Tensor"),
    "assigned": (assigned, "aten.div.Tensor"),
    "all at once": (all_at_once, "aten._foreach_div_.List"),
    "by a factor": (by_a_factor, "aten.div.Tensor"),
}


@pytest.mark.parametrize("name", DIVIDES)
def test_the_edit_is_named_at_its_own_step(name: str, run_folder: Path) -> None:
    edit, op = DIVIDES[name]
    first, *later = diagnosed(edit, run_folder).incidents
    assert (first.cause, first.op, first.step, first.last_step) == (Cause.DIV_ZERO, op, BAD, BAD)
    assert (first.replay, first.trigger) == ("exact", "nonfinite_gradient")
    assert first.source is not None
    assert first.source.function == edit.__name__
    assert [(each.cause, each.step, each.last_step) for each in later] == [(Cause.BAD_WEIGHT, BAD + 1, STEPS - 1)]
    assert later[0].written_by is not None
    assert later[0].written_by.step == BAD


@pytest.mark.parametrize("options", [{"parts": 3}, {"fused": True}, {"bad": STEPS - 1}], ids=str)
def test_whatever_the_rest_of_the_loop_is_like(options: dict[str, int], run_folder: Path) -> None:
    first = diagnosed(in_place, run_folder, **options).incidents[0]
    assert (first.cause, first.op, first.step) == (Cause.DIV_ZERO, "aten.div_.Tensor", options.get("bad", BAD))


@pytest.mark.parametrize("limit", ["MOST_KEPT", "MOST_CALLS"])
def test_an_edit_that_was_too_much_to_keep_is_told_at_its_own_step(
    limit: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unscaled_edits, limit, 2)
    first, *later = diagnosed(assigned, run_folder).incidents
    assert (first.cause, first.step, first.last_step) == (Cause.UNKNOWN, BAD, BAD)
    assert (first.replay, first.replay_reason) == ("unavailable", unscaled_edits.TOO_MUCH)
    assert [(each.cause, each.step) for each in later] == [(Cause.BAD_WEIGHT, BAD + 1)]
    assert later[0].written_by is not None
    assert later[0].written_by.step == BAD


def test_a_healthy_edit_that_is_too_much_to_keep_is_not_told(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unscaled_edits, "MOST_KEPT", 2)
    diagnosis = diagnosed(HEALTHY["a quotient that is guarded"], run_folder)
    assert diagnosis.verdict is Verdict.HEALTHY, diagnosis.summary


@pytest.mark.parametrize("replaced", [False, True])
def test_gradients_that_were_replaced_count_as_kept(
    replaced: bool, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            copy = parameter.grad.clone()
            if replaced:
                parameter.grad = copy
        in_place(parameters)

    size = sum(each.nbytes for each in trained(copied, None))
    monkeypatch.setattr(
        unscaled_edits, "MOST_KEPT", size + size // 2
    )  # copies and norms fit, gradients beside them do not
    first = diagnosed(copied, run_folder).incidents[0]
    told = (Cause.UNKNOWN, unscaled_edits.TOO_MUCH) if replaced else (Cause.DIV_ZERO, "")
    assert (first.step, first.cause, first.replay_reason) == (BAD, *told)


def test_a_sparse_gradient_may_be_replaced(run_folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.EmbeddingBag(WIDTH, 2, mode="sum", sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scope = ampscope.watch(model, scaler, dir=run_folder, quiet=True)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.tensor([[0, 1]])).square().mean()).backward()
        scaler.unscale_(optimizer)
        gradient = model.weight.grad
        assert gradient is not None
        model.weight.grad = gradient.coalesce() * (0.5 if step < 2 else math.inf)
        scaler.step(optimizer)
        scaler.update()
    scope.close()
    (incident,) = ampscope.diagnose(run_folder).incidents
    assert (incident.step, incident.trigger) == (2, "nonfinite_gradient")


def test_what_the_loop_dropped_is_gone_when_the_optimizer_steps(run_folder: Path) -> None:
    torch.manual_seed(0)
    models = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scope = ampscope.watch(models, scaler, dir=run_folder, quiet=True)
    dropped: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    optimizers[-1].register_step_pre_hook(lambda *_: alive.append(sum(each() is not None for each in dropped)))
    for step in range(STEPS):
        dropped.clear()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = sum(each(torch.randn(4, WIDTH)).float().square().mean() for each in models)
        scaler.scale(torch.as_tensor(loss)).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        for parameter in models.parameters():
            assert parameter.grad is not None
            norm = parameter.grad.norm() if step < STEPS - 1 else torch.zeros(())
            dropped += map(weakref.ref, (parameter.grad, norm))
            parameter.grad = parameter.grad / norm
            del norm
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    scope.close()
    assert alive[:-1] == [0] * (STEPS - 1)
    first = ampscope.diagnose(run_folder).incidents[0]
    assert (first.cause, first.step, first.replay) == (Cause.DIV_ZERO, STEPS - 1, "exact")


def guarded(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad = torch.nan_to_num(parameter.grad / parameter.grad.norm())


HEALTHY: dict[str, Edit] = {
    "torch's own clipping": lambda parameters: clip_grad_norm_(parameters, 0.1),
    "a norm with an eps": lambda parameters: [g.div_(g.norm() + 1e-6) for g in gradients(parameters)],
    "a quotient that is guarded": guarded,
    "noise": lambda parameters: [g.add_(torch.randn_like(g), alpha=1e-3) for g in gradients(parameters)],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_stays_finite_is_not_told(name: str, run_folder: Path) -> None:
    diagnosis = diagnosed(HEALTHY[name], run_folder)
    assert diagnosis.verdict is Verdict.HEALTHY, diagnosis.summary


@pytest.mark.parametrize("edit", [in_place, HEALTHY["noise"], HEALTHY["torch's own clipping"]])
def test_training_keeps_its_bits(edit: Edit, run_folder: Path) -> None:
    pairs = zip(trained(edit, None), trained(edit, run_folder), strict=True)
    assert all(torch.equal(alone, watched) or alone.isnan().all() for alone, watched in pairs)


def test_gradients_are_looked_at_again_where_more_than_torchs_clipping_ran(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []
    monkeypatch.setattr(OpenStep, "changed", lambda _, optimizer, norm: looks.append(norm))
    trained(HEALTHY["torch's own clipping"], run_folder / "clipped")
    assert looks == []
    trained(HEALTHY["a norm with an eps"], run_folder / "divided")
    assert len(looks) == 1
