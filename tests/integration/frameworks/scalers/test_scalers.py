"""Scalers are recognised by what they do, or refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import functional as F

import ampscope
from ampscope.analysis.results import Incident
from ampscope.errors import WatchError
from ampscope.trace.schema import Phase, ReplayStatus, ScalerAction, Table
from ampscope.trace.vocabulary import Verdict
from tests.support.training.twin_runs import train_both

STEPS, BAD_STEP = 8, 5
SCALE = 128.0


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


class NativeScaler:
    """Calls a scaler for the loop, as timm's and others do."""

    def __init__(self) -> None:
        self._scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    def __call__(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        self._scaler.scale(loss).backward()
        self._scaler.step(optimizer)
        self._scaler.update()


class ShardedNativeScaler(NativeScaler):
    def __init__(self) -> None:
        self._scaler = ShardedGradScaler("cpu", init_scale=SCALE)


def training(make: Callable[[], NativeScaler], *, bad: bool, given: Callable[[Any], Any]) -> Callable[..., Any]:
    """A loop whose scaler is ``given`` to ``watch``."""

    def loop(watch: Callable[..., Any]) -> Any:
        model = nn.Sequential(nn.Linear(8, 16), Square(), nn.Linear(16, 4))
        optimizer, scaler, losses = torch.optim.AdamW(model.parameters(), 1e-3), make(), []
        watch(model, given(scaler))
        for step in range(STEPS):
            x = torch.randn(4, 8) * (5000 if bad and step == BAD_STEP else 1)
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(x).float(), torch.randint(0, 4, (4,)))
            scaler(loss, optimizer)
            optimizer.zero_grad()
            losses.append(loss.detach())
        return model, optimizer, scaler._scaler, losses

    return loop


GIVEN = {
    "the scaler": lambda scaler: scaler._scaler,
    "what holds it": lambda scaler: scaler,
    "nothing": lambda scaler: None,
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("make", [NativeScaler, ShardedNativeScaler])
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
class TestHowItIsGiven:
    def test_a_healthy_run(
        self, make: Callable[[], NativeScaler], given: Callable[[Any], Any], run_folder: Path
    ) -> None:
        watched = train_both(training(make, bad=False, given=given), run_folder)
        assert [row.scale for row in watched.steps] == [SCALE] * STEPS
        assert watched.warnings == []
        assert ampscope.diagnose(run_folder).verdict == Verdict.HEALTHY

    def test_a_skipped_step(
        self, make: Callable[[], NativeScaler], given: Callable[[Any], Any], run_folder: Path
    ) -> None:
        watched = train_both(training(make, bad=True, given=given), run_folder)
        assert [row.step for row in watched.steps if row.skipped] == [BAD_STEP]
        assert watched.replay_of(BAD_STEP) == (ReplayStatus.EXACT, "")
        actions = [row.action for row in watched.run.rows(Table.SCALER_EVENTS)]
        assert actions[:3] == [ScalerAction.INIT, ScalerAction.SKIP, ScalerAction.BACKOFF]
        primary = ampscope.diagnose(run_folder).primary
        assert isinstance(primary, Incident)
        assert (primary.step, primary.op, primary.module) == (BAD_STEP, "aten.mul.Tensor", "1")
        assert primary.phase == Phase.FORWARD


class DeepSpeedLike:
    """The public interface of DeepSpeed's ``LossScalerBase``."""

    cur_scale = SCALE

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def update_scale(self, overflow: bool) -> None: ...

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None: ...


class MegatronLike:
    """The public interface of Megatron's ``MegatronGradScaler``."""

    @property
    def scale(self) -> Tensor:
        return torch.tensor([SCALE])

    @property
    def inv_scale(self) -> Tensor:
        return self.scale.reciprocal()

    def update(self, found_inf: bool) -> None: ...


@pytest.mark.parametrize(
    ("scaler", "said"),
    [(DeepSpeedLike(), "as DeepSpeed's"), (MegatronLike(), "as Megatron's"), (object(), "and what holds one, not")],
)
def test_a_scaler_that_cannot_be_followed_is_refused_in_one_sentence(scaler: Any, said: str, run_folder: Path) -> None:
    with pytest.raises(WatchError, match=said) as refused:
        ampscope.watch(nn.Linear(2, 2), scaler, dir=run_folder)
    assert "watch(model)" in str(refused.value)
    assert type(scaler).__qualname__ in str(refused.value)
    assert not run_folder.exists()
