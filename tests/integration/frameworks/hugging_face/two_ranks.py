"""One rank of trainings under ``DistributedDataParallel``: by a ``Trainer`` or an ``Accelerator``, healthy and failing.

    torchrun --nproc-per-node 2 -m tests.integration.frameworks.hugging_face.two_ranks FOLDER trainer

Trains each unwatched and watched into ``FOLDER/healthy`` and ``FOLDER/failing``, where the last rank goes bad, and
leaves digests of what came out there, ``unwatched-RANK`` and ``watched-RANK``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import TrainerCallback

import ampscope
from ampscope.integrations.transformers import WatchCallback
from tests.integration.frameworks.hugging_face import small_accelerator, small_trainer
from tests.support.training.twin_runs import digest


def by_a_trainer(folder: Path, *, watched: bool, bad: bool) -> dict[str, bytes]:
    callbacks: list[TrainerCallback] = [small_trainer.overflowing("fp16")] if bad else []
    if watched:
        callbacks.append(WatchCallback(quiet=True))
    made = small_trainer.make_trainer(folder, "fp16", callbacks, ddp_backend="gloo", optim="adamw_torch")
    return small_trainer.train(made)


def by_an_accelerator(folder: Path, *, watched: bool, bad: bool) -> dict[str, bytes]:
    scopes: list[ampscope.Scope] = []

    def watch(accelerator: Accelerator) -> None:
        if watched:
            scopes.append(ampscope.watch(accelerator, dir=folder / "_ampscope", quiet=True))

    state = small_accelerator.train(small_accelerator.make_accelerator("fp16"), watch, bad=bad)
    for scope in scopes:
        scope.close()
    return state


WAYS: dict[str, Callable[..., dict[str, bytes]]] = {"trainer": by_a_trainer, "accelerator": by_an_accelerator}


def main(folder: Path, way: str) -> None:
    torch.set_num_threads(1)
    rank, last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    for kind in ("healthy", "failing"):
        home = folder / kind
        home.mkdir(exist_ok=True)
        for watched in (False, True):
            state = WAYS[way](home, watched=watched, bad=kind == "failing" and rank == last)
            (home / f"{'watched' if watched else 'unwatched'}-{rank}").write_text(digest(state))
            small_accelerator.forget_accelerate()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
