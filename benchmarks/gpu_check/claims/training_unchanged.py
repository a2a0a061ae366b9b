"""Watching changes no bit of a training, through steps that go wrong and are replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpu_check.claim import Claim, Skipped, another_device, be_deterministic, expect, need_cuda
from gpu_check.recorded import rows, switched_off
from gpu_check.trainings import Convolutions, Loop, Recurrent, Transformer, watch

STEPS = 30
BAD = (11, 20)


def _trained(make: Callable[[], Loop], *, is_watched: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Everything that a training leaves behind, by name; and how its bad steps were replayed."""
    loop = make()
    scope = watch(loop) if is_watched else None
    losses = [loop.step(loop.bad_frames() if step in BAD else None) for step in range(STEPS)]
    left = dict(_left(loop, losses))
    if scope is None:
        return left, []
    scope.close()
    off = switched_off(scope.folder)
    expect(not off, f"a part of AMPscope failed: {off}")
    return left, [row["replay"] for row in rows(scope.folder, "incidents")]


def _left(loop: Loop, losses: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield "losses", torch.stack(losses)
    yield from loop.model.state_dict().items()
    for number, state in loop.optimizer.state_dict()["state"].items():
        yield from ((f"optimizer state {number}.{name}", value) for name, value in state.items())
    yield from ((f"scaler {name}", torch.tensor(value)) for name, value in loop.scaler.state_dict().items())
    yield "random state cpu", torch.get_rng_state()
    if loop.device.type != "cpu":
        kind = torch.get_device_module(loop.device)
        yield from ((f"random state {n}", kind.get_rng_state(n)) for n in range(kind.device_count()))


def _differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name in one if not torch.equal(_bits(one[name]), _bits(other[name]))]


def _bits(value: Tensor) -> Tensor:
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def _same(make: Callable[[], Loop]) -> str:
    be_deterministic()
    first, second = (_trained(make, is_watched=False)[0] for _ in range(2))
    changes = _differing(first, second)
    if changes:
        raise Skipped(
            f"two unwatched trainings differ here, in {', '.join(changes[:3])}: kernels are not deterministic"
        )
    left, replays = _trained(make, is_watched=True)
    changes = _differing(first, left)
    expect(not changes, f"{len(changes)} of {len(first)} differ: {', '.join(changes[:5])}")
    expect(len(replays) == len(BAD), f"{len(BAD)} steps went wrong, {len(replays)} incidents were recorded")
    return f"{len(first)} tensors bit for bit; replays {', '.join(replays)}"


def _of(build: Callable[[], nn.Module] = Transformer, **options: Any) -> Callable[[torch.device], str]:
    return lambda device: _same(lambda: Loop(device, build, **options))


def _images(device: torch.device) -> str:
    torch.backends.cudnn.benchmark = True
    return _same(lambda: Loop(device, Convolutions))


def _recurrent(device: torch.device) -> str:
    need_cuda(device, "cuDNN; on a CPU an LSTM does not train in float16")
    return _same(lambda: Loop(device, Recurrent))


def _elsewhere(device: torch.device) -> str:
    return _of()(another_device(device))


CLAIMS = (
    Claim(
        "unchanged", "30 steps with 2 bad ones, fp16, scaler, dropout: watched and unwatched are the same bits", _of()
    ),
    Claim("unchanged-fused", "the same with a fused optimizer, which decides on the device", _of(fused=True)),
    Claim("unchanged-images", "the same with channels_last convolutions and cudnn.benchmark", _images),
    Claim("unchanged-checkpoint", "the same with checkpointing", _of(partial(Transformer, reentrant=False))),
    Claim("unchanged-reentrant", "the same with reentrant checkpointing", _of(partial(Transformer, reentrant=True))),
    Claim("unchanged-lstm", "the same with dropout inside an LSTM, whose state cuDNN keeps for itself", _recurrent),
    Claim("unchanged-elsewhere", "the same on a device that is not the current one", _elsewhere),
)
