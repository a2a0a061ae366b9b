"""One rank of trainings with Fabric's ``ddp`` strategy, watched and not: run it with torchrun.

    torchrun -m tests.integration.frameworks.fabric.ranks FOLDER

The last rank gets a bad batch. Each setting writes its run into ``FOLDER/SETTING``; rank K leaves
``FOLDER/SETTING-K.txt``, which says whether watching changed nothing.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ampscope.integrations.lightning import WatchCallback
from tests.integration.frameworks.fabric.small_fabric import LARGE, alike, fabric, loss_inside, train, unwatched

#: How the loop is written: the model called, and its own step, which Fabric sends through forward.
SETTINGS: dict[str, dict[str, Any]] = {
    "forward": {},
    "accumulated": {"micro_batches": 2},
    "training_step": {"loss_of": loss_inside},
}


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name, setting in SETTINGS.items():
        made = fabric("16-mixed", strategy="ddp", devices=2)
        made.launch()
        options = {**setting, "bad": LARGE if made.global_rank == 1 else 1.0}
        expected = train(made, unwatched, **options)
        made = fabric("16-mixed", strategy="ddp", devices=2)
        made.launch()
        left = train(made, WatchCallback(quiet=True, dir=folder / name), **options)
        (folder / f"{name}-{made.global_rank}.txt").write_text("alike" if alike(left, expected) else "different")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
