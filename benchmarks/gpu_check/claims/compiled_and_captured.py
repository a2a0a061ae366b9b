"""CUDA graphs, captured by hand, by `make_graphed_callables` and by `torch.compile`."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn

from gpu_check.claim import Claim, Skipped, expect, need_cuda
from gpu_check.recorded import rows, switched_off
from gpu_check.trainings import Convolutions, Loop, watch

BAD = 12


def _captured(device: torch.device) -> str:
    """A graph of a watched forward and backward can be captured, and computes what it would have unwatched."""
    need_cuda(device, "graph capture")
    losses = []
    for is_watched in (False, True):
        loop = Loop(device, Convolutions)
        loop.model.eval()  # without dropout, so that both draw nothing
        scope = watch(loop) if is_watched else None
        losses.append(_through_a_graph(loop))
        if scope is not None:
            scope.close()
            off = switched_off(scope.folder)
            expect(not off, f"a part of AMPscope failed: {off}")
    expect(torch.equal(*losses), f"losses {losses[1].tolist()} for {losses[0].tolist()}")
    return "captured, the same losses"


def _through_a_graph(loop: Loop) -> Tensor:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            loop.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    loop.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph), torch.autocast("cuda", dtype=torch.float16, cache_enabled=False):
        loss = loop.loss(loop.model(loop.frames))
        loop.scaler.scale(loss).backward()
    losses = []
    for _ in range(5):
        graph.replay()
        loop.finish()
        losses.append(loss.detach().clone())
    return torch.stack(losses)


class _Graphed(nn.Module):
    """Convolutions whose layers a graph runs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Convolutions()

    def forward(self, frames: Tensor) -> Tensor:
        logits: Tensor = self.net(frames)
        return logits


def _graphed(device: torch.device) -> str:
    need_cuda(device, "graphed callables")
    statistics, replays = [], []
    for is_watched in (False, True):
        loop = Loop(device, _Graphed)
        net = loop.model.get_submodule("net")
        with torch.autocast("cuda", dtype=torch.float16, cache_enabled=False):
            torch.cuda.make_graphed_callables(net, (loop.frames.clone(),))
        scope = watch(loop) if is_watched else None
        for step in range(BAD + 3):
            loop.step(loop.bad_frames() if step == BAD else None)
        statistics.append(torch.cat([b.float().flatten() for b in loop.model.buffers()]))
        if scope is not None:
            scope.close()
            replays = [row["replay"] for row in rows(scope.folder, "incidents", step=BAD)]
    expect(torch.equal(*statistics), "BatchNorm's running statistics differ from the unwatched training's")
    expect(replays, f"no incident at step {BAD}")
    return f"BatchNorm's statistics are the same; the bad step's replay: {replays[0]}"


class _WithLoss(nn.Module):
    """Convolutions that give their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Convolutions()

    def forward(self, frames: Tensor) -> Tensor:
        logits = self.net(frames)
        return logits.float().square().mean()


class _LossInside(Loop):
    """A loop whose loss is made inside the compiled model."""

    def loss(self, logits: Tensor) -> Tensor:
        return logits


def _compiled(device: torch.device) -> str:
    need_cuda(device, "reduce-overhead, which captures graphs")
    if importlib.util.find_spec("triton") is None:
        raise Skipped("torch.compile needs Triton here")
    loop = _LossInside(device, _WithLoss, fused=True)
    loop.model.compile(mode="reduce-overhead")
    scope = watch(loop)
    for _ in range(BAD + 3):
        loop.step()
    scope.close()
    off = switched_off(scope.folder)
    expect(not off, f"a part of AMPscope failed: {off}")
    losses = [row["loss"] for row in rows(scope.folder, "steps")]
    expect(len(losses) == BAD + 3 and None not in losses, f"{len(losses)} steps were recorded, losses {losses}")
    return f"{len(losses)} steps with their losses"


CLAIMS = (
    Claim("captured", "a watched forward and backward can be captured into a CUDA graph", _captured),
    Claim("graphed", "make_graphed_callables with BatchNorm: a bad step leaves the statistics alone", _graphed),
    Claim(
        "reduce-overhead",
        "torch.compile(mode='reduce-overhead'), the loss inside, fused: every step recorded",
        _compiled,
        120.0,
    ),
)
