"""What a loop hands back, and the exact state that two runs of it are compared by."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

#: How a loop lets someone look on: called once with the model and its scaler, before the first step.
Watch = Callable[[nn.Module, Any], object]


@dataclass(frozen=True, slots=True)
class Trained:
    """The end of a training run."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any  #: a ``GradScaler``, new or deprecated name
    losses: list[float]  #: one per optimizer step attempt
    skipped: list[int]  #: step attempts whose scale fell


def seed_everything(seed: int) -> None:
    """Seed each generator a training loop may draw from."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def exact_state(run: Trained) -> dict[str, bytes]:
    """Every value that a run leaves behind, bit for bit: NaNs compare equal and -0.0 differs from 0.0.

    Reads the process's random streams as well, so call it straight after training.
    """
    state = {name: _bits(value) for name, value in _leaves("rng", _random_streams())}
    parts = {
        "losses": run.losses,
        "model": run.model.state_dict(),
        "grad": {name: p.grad for name, p in run.model.named_parameters()},
        "training": {name: m.training for name, m in run.model.named_modules()},
        "optimizer": run.optimizer.state_dict(),
        "scaler": run.scaler.state_dict(),
    }
    return state | {name: _bits(value) for name, value in _leaves("", parts)}


def differences(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    """Names of the values in which two runs differ."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _random_streams() -> dict[str, object]:
    streams: dict[str, object] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        generators = torch.get_device_module(accelerator)
        streams["accelerator"] = [generators.get_rng_state(i) for i in range(torch.accelerator.device_count())]
    return streams


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for position, inner in enumerate(value):
            yield from _leaves(f"{name}.{position}", inner)
    else:
        yield name, value


def _bits(value: object) -> bytes:
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        return f"{plain.dtype} {tuple(plain.shape)} ".encode() + plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, float):
        return struct.pack("<d", value)
    return repr(value).encode()
