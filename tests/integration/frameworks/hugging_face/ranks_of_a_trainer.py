"""One rank of a ``Trainer`` under ``DistributedDataParallel``; in fp16 one rank's layer overflows in one step.

    torchrun --nproc-per-node 2 -m tests.integration.frameworks.hugging_face.ranks_of_a_trainer FOLDER WATCHED BAD

``WATCHED`` is 1 or 0; ``BAD`` is the rank that goes bad, or -1. Each rank leaves a digest of its weights in FOLDER.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import torch
from transformers import TrainerCallback

from ampscope.integrations.transformers import WatchCallback
from tests.integration.frameworks.hugging_face.small_trainer import make_trainer, overflowing, train


def main(folder: Path, watched: bool, bad: int) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    callbacks: list[TrainerCallback] = [overflowing("fp16")] if rank == bad else []
    if watched:
        callbacks.append(WatchCallback(quiet=True))
    made = make_trainer(folder, "fp16", callbacks, ddp_backend="gloo", optim="adamw_torch")
    state = train(made)
    digest = hashlib.sha256(b"".join(bits for _, bits in sorted(state.items())))
    (folder / f"weights-{rank}").write_text(digest.hexdigest())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "1", int(sys.argv[3]))
