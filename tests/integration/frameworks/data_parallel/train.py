"""One rank of trainings with ``DistributedDataParallel``, watched and not: run it with torchrun.

    torchrun -m tests.integration.frameworks.data_parallel.train FOLDER SETTING...

Each setting is trained healthy and with a failure, each unwatched and watched, into ``FOLDER/SETTING/healthy`` and
``FOLDER/SETTING/failing``. Rank K leaves ``FOLDER/SETTING/KIND-K.json``: a digest of what each training came to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F

import ampscope
from tests.integration.frameworks.data_parallel.settings import BAD, SETTINGS, WIDTH, Setting

BATCH = 4


class Training:
    """One training of one setting on this rank.

    Args:
        setting: How to train.
        run: The folder of its run; None to train unwatched.
        failing: Whether one of its steps goes wrong.
    """

    def __init__(self, setting: Setting, run: Path | None, *, failing: bool) -> None:
        self.setting = setting
        self.failing = failing
        torch.manual_seed(0)
        self.model = self._wrapped(setting.model())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=setting.scale or 1.0, enabled=setting.scale is not None)
        watched = self.model.module if setting.inner_watched else self.model
        assert isinstance(watched, nn.Module)
        self.scope = ampscope.watch(watched, self.scaler, dir=run) if run is not None else None
        self.losses: list[float] = []

    def _wrapped(self, inner: nn.Module) -> nn.Module:
        if self.setting.sum_by_hand:
            return inner
        if self.setting.compiled:
            inner.compile(backend="aot_eager")
        model = nn.parallel.DistributedDataParallel(inner, **self.setting.options)
        if self.setting.hook is not None:
            model.register_comm_hook(None, self.setting.hook)
        return model

    def run(self) -> str:
        """Trains; a digest of losses, weights and scale."""
        torch.manual_seed(1 + dist.get_rank())
        with Join([self.model]) if self.setting.uneven else contextlib.nullcontext():  # type: ignore[list-item]
            for step in range(self.setting.steps(last=_is_last())):
                self._step(step)
        if self.scope is not None:
            self.scope.close()
        weights = b"".join(weight.detach().numpy().tobytes() for weight in self.model.parameters())
        told = f"{self.losses} {self.scaler.get_scale()}".encode()
        return hashlib.sha256(weights + told).hexdigest()

    def _step(self, step: int) -> None:
        self.optimizer.zero_grad(set_to_none=not self.setting.zeroed)
        for number in range(self.setting.micro_batches):
            last = number == self.setting.micro_batches - 1
            waits = self.model.no_sync() if not (last or self.setting.each_reduced) else contextlib.nullcontext()  # type: ignore[operator]
            with waits:
                self._micro_batch(bad=self.failing and step == BAD and number == 0)
        if self.setting.sum_by_hand:
            self._sum_gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _micro_batch(self, *, bad: bool) -> None:
        here = bad and (self.setting.everywhere or _is_last())
        x, y = self._batch(bad=here and not self.setting.nowhere)
        with torch.autocast("cpu", self.setting.dtype, enabled=self.setting.dtype is not torch.float32):
            loss = F.cross_entropy(self.model(x), y)
        loss = loss * 1e8 if here and self.setting.nowhere else loss
        self.scaler.scale(loss).backward()
        self.losses.append(loss.item())

    def _batch(self, *, bad: bool) -> tuple[Tensor, Tensor]:
        x, y = torch.randn(BATCH, WIDTH), torch.randint(0, 4, (BATCH,))
        return (self.setting.bad(x) if bad else x), y

    def _sum_gradients(self) -> None:
        for weight in self.model.parameters():
            if weight.grad is not None:
                dist.all_reduce(weight.grad)
                weight.grad /= dist.get_world_size()


def _is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def train(folder: Path, name: str) -> None:
    """All trainings of a setting on this rank."""
    for kind in ("healthy", "failing"):
        digests: dict[str, Any] = {}
        for watched in (False, True):
            run = folder / name / kind if watched else None
            torch.compiler.reset()
            digests["watched" if watched else "unwatched"] = Training(
                SETTINGS[name], run, failing=kind == "failing"
            ).run()
        (folder / name / f"{kind}-{dist.get_rank()}.json").write_text(json.dumps(digests))


def main(folder: str, *names: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in names:
        train(Path(folder), name)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
