"""An eager run against a compiled one: the same numbers are called the same, and no op is called missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import ampscope
from ampscope.analysis.replay.compare.compare_results import DifferenceKind, Likeness
from ampscope.analysis.replay.compare.comparison import compare
from tests.support.training.small_loop import BATCH, WIDTH, make_scaler, mlp

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def trained(folder: Path, backend: str = "", *, lr: float = 0.01) -> Path:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = mlp()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr), make_scaler()
    if backend:
        model.compile(backend=backend)
    with ampscope.watch(model, scaler, dir=folder, every=1, quiet=True):
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.mse_loss(model(torch.randn(BATCH, WIDTH)), torch.randn(BATCH, WIDTH))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    torch._dynamo.reset()
    return folder


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("turned", [False, True])
def test_the_same_training_is_the_same_though_one_is_compiled(backend: str, turned: bool, tmp_path: Path) -> None:
    eager, compiled = trained(tmp_path / "eager"), trained(tmp_path / "compiled", backend)
    found = compare(compiled, eager) if turned else compare(eager, compiled)
    assert found.likeness is Likeness.WITHIN_TOLERANCE, found.summary
    assert found.first_divergence is None
    assert found.traced == 4
    told = [each for each in found.differences if each.kind is not DifferenceKind.ENVIRONMENT]
    first = told[0]
    assert first.kind is DifferenceKind.NOT_COMPARED
    assert first.text.startswith(f"{'A' if turned else 'B'} recorded the ops of 4 steps by running the step again")
    assert {each.kind for each in told[1:]} <= {DifferenceKind.LOSS, DifferenceKind.GRAD_NORM}, (
        told
    )  # within tolerance, by inductor


def test_another_learning_rate_is_told_though_one_is_compiled(tmp_path: Path) -> None:
    found = compare(trained(tmp_path / "eager"), trained(tmp_path / "compiled", "eager", lr=0.05))
    assert found.likeness is Likeness.DIFFERENT
    assert [each.kind for each in found.differences][:1] == [DifferenceKind.LEARNING_RATE]
    assert found.first_divergence is not None
    assert (found.first_divergence.step >= 1, found.first_divergence.op) == (True, "")


def test_two_compiled_runs_are_compared_op_by_op(tmp_path: Path) -> None:
    found = compare(trained(tmp_path / "a", "eager"), trained(tmp_path / "b", "eager"))
    assert found.likeness is Likeness.IDENTICAL, found.summary
    assert not [each for each in found.differences if each.kind is DifferenceKind.NOT_COMPARED]
