"""One of two ranks that train under DistributedDataParallel, one of which may go bad.

    python -m tests.integration.ranks.healed_ranks FOLDER PLAN

``PLAN`` is JSON: which ranks ``heal``, on which the layer is ``armed`` at the bad step, on which its batch is
``spoilt``, whether the optimizer's state is ``poisoned`` a step before on all ranks, which modules are ``kept`` in
float32 by hand from the bad step on, whether the loop ``clips``, is ``scaled``.
Each leaves a digest of the weights, the loss scale and what it has done at the end in ``FOLDER/told-RANK.json``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import ampscope
from tests.support.training.small_loop import make_batch
from tests.unit.capture.heal.trained import BAD_STEP, SCALE, Doubtful, made

RANKS, STEPS = 2, 6


def main(folder: str, plan: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    model = nn.parallel.DistributedDataParallel(made(Doubtful)) if plan.get("ddp", True) else made(Doubtful)
    inner = model.module if plan.get("ddp", True) else model
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scaled = plan.get("scaled", True)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=scaled)
    scope = None
    if rank in plan.get("watched", []):
        scope = ampscope.watch(model, scaler, dir=f"{folder}/run", heal=rank in plan["heal"])
    torch.manual_seed(1 + rank)
    for step in range(STEPS):
        x, y = make_batch()
        if step == BAD_STEP and rank in plan.get("spoilt", []):
            x[1, 2] = torch.nan
        inner.armed = step == BAD_STEP and rank in plan.get("armed", [])
        if step == BAD_STEP - 1 and plan.get("poisoned"):
            next(iter(optimizer.state.values()))["exp_avg"].fill_(torch.nan)
        if step == BAD_STEP and "kept" in plan:
            ampscope.keep_fp32(model, plan["kept"])
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16 if scaled else torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        if plan.get("clips"):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    kept = [name for name, module in inner.named_modules() if "forward" in vars(module)]
    if scope is not None:
        scope.close()
    told = {"weights": hashlib.sha256(weights).hexdigest(), "scale": scaler.get_scale(), "kept": kept}
    Path(folder, f"told-{rank}.json").write_text(json.dumps(told), "utf-8")
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that leaves in the ordinary way


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
