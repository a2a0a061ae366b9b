"""What must not run a second time is refused before anything of it is run, in words that say why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampscope.capture.rerun import obstacles
from ampscope.trace.schema import ReplayStatus
from tests.support.training.small_loop import POISONED, STEPS, WIDTH, mlp, train
from tests.support.training.twin_runs import train_both


class OnStaticMemory(nn.Module):
    """Its forward stands for a graph's: it computes on memory that is in no attribute, the same whoever calls it."""

    def __init__(self, memory: Tensor) -> None:
        super().__init__()
        self.inner = mlp()

        def new_fwd(x: Tensor) -> Tensor:
            memory.add_(1)
            return type(self).forward(self, x)

        new_fwd.__module__ = "torch.cuda.graphs"
        self.__dict__["forward"] = new_fwd

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def test_a_graphed_callable_runs_once_a_step(run_folder: Path) -> None:
    counts: list[Tensor] = []

    def loop(watch: Callable[..., object]) -> Any:
        counts.append(torch.zeros(()))
        return train(watch, nn.Sequential(OnStaticMemory(counts[-1])))

    watched = train_both(loop, run_folder)
    status, reason = watched.replay_of(POISONED)
    assert status == ReplayStatus.UNAVAILABLE
    assert "a part of OnStaticMemory was captured into a CUDA graph" in reason
    assert list(map(int, counts)) == [STEPS, STEPS]


def _because(*roots: nn.Module) -> str:
    return obstacles.obstacle_of_models(roots, [module for root in roots for module in root.modules()])


def test_a_graph_that_the_users_forward_replays_is_one_too() -> None:
    model = mlp()
    model.__dict__["graphs"] = {"train": type("CUDAGraph", (), {"__module__": "torch.cuda.graphs"})()}
    assert "CUDA graph" in _because(model)


def test_data_parallel_on_several_devices() -> None:
    model = nn.DataParallel(mlp())
    assert _because(model) == ""
    model.device_ids = [0]
    assert _because(model) == ""
    model.device_ids = [0, 1]
    assert "DataParallel runs each part of a batch on another device" in _because(model)
    assert "DataParallel" in _because(nn.Sequential(model))


@pytest.mark.parametrize(
    ("options", "on_cuda", "refused"),
    [
        ({"num_layers": 2, "dropout": 0.5}, True, True),
        ({"num_layers": 2, "dropout": 0.5}, False, False),
        ({"num_layers": 2}, True, False),
        ({"num_layers": 1}, True, False),
    ],
)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_the_dropout_of_cudnn(
    kind: Any, options: dict[str, Any], on_cuda: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(kind(WIDTH, WIDTH, **options))
    if on_cuda:
        monkeypatch.setattr(model[0], "parameters", lambda **_: [SimpleNamespace(is_cuda=True)])
    assert (f"the dropout between the layers of {kind.__name__} is drawn" in _because(model)) is refused
    assert _because(model.eval()) == ""


@pytest.mark.parametrize(
    ("home", "name"),
    [
        ("deepspeed.runtime.engine", "DeepSpeedEngine"),
        ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel"),
    ],
)
def test_wrappers_that_count_what_runs_through_them(home: str, name: str) -> None:
    kind = type(name, (nn.Module,), {"__module__": home})
    derived = type("Engine", (kind,), {})
    assert f"{name} notes each forward" in _because(kind())
    assert f"{name} notes each forward" in _because(derived())


def test_an_ordinary_model_is_run_again() -> None:
    assert _because(nn.Sequential(mlp(), nn.LSTM(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))) == ""
