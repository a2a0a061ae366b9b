"""Models that communicate inside forward, or through autograd, each in a way of its own, trained on every rank.

    torchrun --nproc-per-node 2 -m tests.integration.frameworks.sharded.receiving FOLDER

At the last step rank 1 has a batch that is bad. Writes down the digests of the weights, by model and by how it was
trained.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import _functional_collectives as functional
from torch.nn import functional as F

import ampscope

WIDTH, BATCH, STEPS, BAD_RANK = 8, 4, 5, 1
BAD_STEP = STEPS - 1
#: Elements of what is too large for AMPscope to copy.
LARGE = 1 << 15

Exchange = Callable[[Tensor], Tensor]


def averaged(hidden: Tensor) -> Tensor:
    """Less the mean over all ranks, which is made in place."""
    mean = hidden.detach().mean(0)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    return hidden - mean


def in_time(hidden: Tensor) -> Tensor:
    """Less the sum over all ranks, which is on its way while something else is computed."""
    total = hidden.detach().mean(0)
    work = dist.all_reduce(total, async_op=True)
    hidden = hidden.tanh()
    assert work is not None
    work.wait()
    return hidden - total


def gathered(hidden: Tensor) -> Tensor:
    """Compared with the batches of all ranks."""
    parts = [torch.empty_like(hidden) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, hidden.detach())
    return hidden @ torch.cat(parts).t()


def through_autograd(hidden: Tensor) -> Tensor:
    """Less the mean over all ranks, through which gradients flow: backward communicates too."""
    total: Any = dist_nn.all_reduce(hidden.mean(0))
    return hidden - total / dist.get_world_size()


class _Normalised(Function):
    """Synchronised normalisation: sums are gathered in forward, and reduced in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        own = torch.stack([hidden.sum(0), hidden.square().sum(0)])
        every = own.new_empty(dist.get_world_size(), *own.shape)
        dist.all_gather(list(every), own)
        count = hidden.shape[0] * dist.get_world_size()
        mean, square = every.sum(0) / count
        scale = (square - mean.square() + 1e-5).rsqrt()
        ctx.save_for_backward(scale)
        return (hidden - mean) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (scale,) = ctx.saved_tensors
        total = gradient.sum(0)
        dist.all_reduce(total)
        return (gradient - total / gradient.shape[0] / dist.get_world_size()) * scale


def normalised(hidden: Tensor) -> Tensor:
    """As synchronised batch normalisation does."""
    return _Normalised.apply(hidden)


def _large(hidden: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    total = hidden.detach().sum() * torch.ones(LARGE)
    dist.all_reduce(total)
    return hidden - change(total)[0]


def large(hidden: Tensor) -> Tensor:
    """Something large is received, and left as it is."""
    return _large(hidden, lambda total: total / LARGE)


def large_and_changed(hidden: Tensor) -> Tensor:
    """Something large is received, and divided in place."""
    return _large(hidden, lambda total: total.div_(LARGE))


def as_op(hidden: Tensor) -> Tensor:
    """Less the mean, by a functional collective, which runs below Python."""
    assert dist.group.WORLD is not None
    return hidden - functional.all_reduce(hidden.detach().mean(0), "avg", dist.group.WORLD)


def alone(hidden: Tensor) -> Tensor:
    """As it is."""
    return hidden


EXCHANGES = (averaged, in_time, gathered, through_autograd, normalised, large, large_and_changed, as_op)


class Model(nn.Module):
    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.exchange = exchange

    def forward(self, x: Tensor) -> Tensor:
        return self.exchange(self.inner(x)).half().square().float()


def loss_in_forward(output: Tensor) -> Tensor:
    return F.softplus(output).mean()


def over_all_ranks(output: Tensor) -> Tensor:
    """The loop communicates by itself: the number of all outputs, on its way meanwhile, and the largest of all."""
    count = torch.tensor(float(output.numel()))
    counting = dist.all_reduce(count, async_op=True)
    own = output.detach().abs().amax().reshape(1)
    parts = [torch.empty(1) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    total = F.softplus(output).sum() / torch.cat(parts).max().clamp(min=1e-3)
    assert counting is not None
    counting.wait()
    return total / count


def train(exchange: Exchange, loss_of: Exchange, bad: float, folder: Path | None = None) -> str:
    """Trains once, watched where there is a folder; ``bad`` is what one element of the bad batch is multiplied with."""
    torch.manual_seed(0)
    model = Model(exchange)
    scope = None if folder is None else ampscope.watch(model, dir=folder, ranks="all", quiet=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        if (step, dist.get_rank()) == (BAD_STEP, BAD_RANK):
            x[1, 2] *= bad
        loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if scope is not None:
        scope.close()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(weights).hexdigest()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cases = [(each.__name__, each, loss_in_forward) for each in EXCHANGES]
    trained = {}
    for name, exchange, loss_of in [*cases, ("loop", alone, over_all_ranks)]:
        for how, bad in (("healthy", 1.0), ("nan", torch.nan)):
            unwatched = train(exchange, loss_of, bad)
            trained[f"{name}/{how}"] = (unwatched, train(exchange, loss_of, bad, folder / name / how))
    train(averaged, loss_in_forward, 1e5, folder / "averaged" / "overflow")
    (folder / f"trained-{dist.get_rank()}.json").write_text(json.dumps(trained), "utf-8")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that leaves in the ordinary way


if __name__ == "__main__":
    main(Path(sys.argv[1]))
