"""Two ranks whose training is split: one bad step changes nothing that follows."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.multiprocessing.spawn import spawn

import ampscope
from gpu_check.claim import Claim, another_device, be_deterministic, expect

STEPS, BAD, RANKS = 16, 11, 2
FRAME, WIDTH = 16, 32
LIMIT = timedelta(seconds=60)


class _Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


def _ddp(model: nn.Module, device: torch.device) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device])


def _fsdp1(model: nn.Module, device: torch.device) -> nn.Module:
    half = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=device, mixed_precision=half)


def _fsdp2(model: nn.Module, device: torch.device) -> nn.Module:
    mesh = init_device_mesh(device.type, (RANKS,))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))
    return model


def _train(rank: int, kind: str, split: Callable[[nn.Module, torch.device], nn.Module], out: str, watch: bool) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, rank)
    if kind == "cuda":
        torch.cuda.set_device(device)
    be_deterministic()
    meeting = f"file://{out}/meeting-{watch}"
    dist.init_process_group(
        "gloo" if kind == "cpu" else "nccl", init_method=meeting, rank=rank, world_size=RANKS, timeout=LIMIT
    )
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(FRAME, WIDTH), _Square(), nn.Linear(WIDTH, 4)).to(device)
    model = split(plain, device)
    sharded = isinstance(model, FullyShardedDataParallel)
    scaler = (ShardedGradScaler if sharded else torch.amp.GradScaler)(kind, init_scale=128.0)
    scope = ampscope.watch(model, scaler, dir=f"{out}/run", ranks="all", quiet=True) if watch else None
    losses = _losses(model, scaler, torch.Generator().manual_seed(rank), device)
    torch.save(losses, f"{out}/losses-{watch}-{rank}.pt")
    if scope is not None:
        scope.close()
    dist.barrier()
    os._exit(0)  # torch may hang where gloo's group is freed while one of its threads waits for the interpreter


def _losses(model: nn.Module, scaler: torch.amp.GradScaler, batches: torch.Generator, device: torch.device) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        frames = torch.randn(8, FRAME, generator=batches).to(device) * (1e4 if step == BAD else 1.0)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):
            loss = model(frames).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach().cpu())
    return torch.stack(losses)


def _same(split: Callable[[nn.Module, torch.device], nn.Module], device: torch.device) -> str:
    if device.type != "cpu":
        another_device(device)
    with tempfile.TemporaryDirectory() as out:
        for watch in (False, True):
            spawn(_train, (device.type, split, out, watch), nprocs=RANKS)
        for rank in range(RANKS):
            unwatched, watched = (torch.load(f"{out}/losses-{watch}-{rank}.pt") for watch in (False, True))
            differ = unwatched.view(torch.int32) != watched.view(torch.int32)
            expect(not differ.any(), f"rank {rank}: losses differ from step {int(differ.int().argmax())} on")
        bad = list(Path(out, "run").glob("rank=*/incidents/*"))
    expect(bad, f"no incident at step {BAD}")
    return f"{STEPS} losses on {RANKS} ranks, bit for bit"


CLAIMS = (
    Claim("ddp", "two ranks, DistributedDataParallel, a bad step: losses as unwatched", partial(_same, _ddp), 120.0),
    Claim("fsdp1", "the same with FullyShardedDataParallel", partial(_same, _fsdp1), 120.0),
    Claim("fsdp2", "the same with fully_shard", partial(_same, _fsdp2), 120.0),
)
