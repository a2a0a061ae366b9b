"""Loops that are killed: each says when the call that ends a step has returned, and may not live on after that.

python -m tests.integration.guest.killed_loops ROOT after
python -m tests.integration.guest.killed_loops ROOT anytime COUNT

Each dies in a process of its own, forked from one that has imported all it needs. ``after``: each loop once its call
has returned for the N-th time, in ROOT/LOOP-N. ``anytime``: COUNT loops, wherever they are; beside each folder
ROOT/NUMBER lies NUMBER.done, with the loop's name and the number of its steps that were over.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ampscope
from tests.support.training.small_loop import GAIN, here, make_batch, make_scaler, mlp, mse

Watch = Callable[..., Any]
Over = Callable[[], None]
#: After how many steps a loop dies.
DEATHS = 1, 4
#: Of the steps of the loops with a scaler each so many overflows.
_OVERFLOWS = 3
#: Steps at most before a death at any time, and seconds from there.
_STEPS, _LONGEST_S = 20, 0.03


def _backward(model: nn.Module, step: int, scaler: torch.amp.GradScaler) -> None:
    with torch.autocast(here(), dtype=torch.float16):
        loss = mse(model, *make_batch())
    (scaler.scale(loss) * (GAIN if step % _OVERFLOWS == 2 else 1.0)).backward()


def scaled(watch: Watch, over: Over, *, micro_batches: int = 1, clip: bool = False, fused: bool = False) -> None:
    model = mlp()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01, fused=fused), make_scaler()
    watch(model, scaler)
    for step in itertools.count():
        optimizer.zero_grad()
        for _ in range(micro_batches):
            _backward(model, step, scaler)
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        over()


def traced(watch: Watch, over: Over) -> None:
    scaled(functools.partial(watch, every=1), over)


def two_optimizers(watch: Watch, over: Over) -> None:
    model = mlp()
    scaler, (first, _, last) = make_scaler(), model
    optimizers = [torch.optim.SGD(part.parameters(), 0.01) for part in (first, last)]
    watch(model, scaler)
    for step in itertools.count():
        model.zero_grad()
        _backward(model, step, scaler)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        over()


def unscaled(watch: Watch, over: Over) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    watch(model)
    while True:
        optimizer.zero_grad()
        with torch.autocast(here(), dtype=torch.bfloat16):
            loss = mse(model, *make_batch())
        loss.backward()
        optimizer.step()
        over()
        scheduler.step()


def with_closure(watch: Watch, over: Over) -> None:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    watch(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mse(model, *make_batch())
        loss.backward()
        return loss

    while True:
        optimizer.step(closure)
        over()


#: By name, with how many optimizers each has.
LOOPS: dict[str, tuple[Callable[[Watch, Over], None], int]] = {
    "scaled": (scaled, 1),
    "micro-batches": (functools.partial(scaled, micro_batches=2), 1),
    "clipped": (functools.partial(scaled, clip=True), 1),
    "fused": (functools.partial(scaled, fused=True), 1),
    "traced": (traced, 1),
    "two-optimizers": (two_optimizers, 2),
    "unscaled": (unscaled, 1),
    "closure": (with_closure, 1),
}


def _forked(name: str, folder: Path, over: Over) -> int:
    """The loop in a process of its own; returns its number."""
    child = os.fork()
    if child:
        return child
    try:
        torch.manual_seed(0)
        LOOPS[name][0](functools.partial(ampscope.watch, dir=folder, quiet=True), over)
    finally:
        os._exit(1)  # a loop that does not end by itself has been left by an exception


def _dies_after(name: str, folder: Path, steps: int) -> None:
    left = itertools.count(steps - 1, -1)

    def over() -> None:
        if not next(left):
            os.kill(os.getpid(), signal.SIGKILL)

    _, status = os.waitpid(_forked(name, folder, over), 0)
    assert os.WIFSIGNALED(status), folder


def _tell(pipe: int) -> None:
    os.write(pipe, b".")


def _dies_anytime(name: str, folder: Path, chance: random.Random) -> None:
    told, tell = os.pipe()
    child = _forked(name, folder, functools.partial(_tell, tell))
    os.close(tell)
    done = sum(len(os.read(told, 1)) for _ in range(chance.randint(0, _STEPS)))
    select.select([], [], [], chance.uniform(0, _LONGEST_S))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    while rest := os.read(told, 1 << 16):
        done += len(rest)
    os.close(told)
    assert os.WIFSIGNALED(status), folder
    folder.with_suffix(".done").write_text(f"{name} {done}")


class _Warm(Exception):
    """All that a loop needs is imported."""


def _warm_up(folder: Path) -> None:
    """What is imported on first use is imported here, and not in each of the forks."""
    scopes: list[ampscope.Scope] = []
    left = itertools.count(max(DEATHS), -1)

    def watch(*watched: Any, **options: Any) -> None:
        scopes.append(ampscope.watch(*watched, dir=folder, quiet=True, **options))

    def over() -> None:
        if not next(left):
            raise _Warm

    with contextlib.suppress(_Warm):
        traced(watch, over)
    scopes[0].close()


def main(root: Path, when: str, count: int = 0) -> None:
    torch.set_num_threads(1)
    _warm_up(root / "warm")
    names = list(LOOPS)
    if when == "after":
        for name, steps in itertools.product(names, DEATHS):
            _dies_after(name, root / f"{name}-{steps}", steps)
    for number in range(count):
        _dies_anytime(names[number % len(names)], root / str(number), random.Random(number))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
