"""The same loop twice, unwatched and watched: what it leaves behind must agree bit for bit.

A loop is a function that takes ``watch`` (called with the model and its scaler before the first step, as
`ampscope.watch`) and returns whatever its state is: models, optimizers, scalers, losses, in any nesting.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ampscope
from ampscope.trace.schema import EventKind, FindingRow, IncidentRow, ReplayStatus, StepRow, Table

Loop = Callable[[Callable[..., Any]], Any]

#: What `Watched.replay_of` says of an exact replay: the status, and no reason against it.
EXACT = (ReplayStatus.EXACT, "")

#: What `torch.nn.Module` itself keeps in a module; everything else there is the user's.
_FURNITURE = frozenset(vars(nn.Module()))


@dataclass(frozen=True, slots=True)
class Watched:
    """A loop that was trained under watch and closed."""

    state: Any  #: what the loop returned
    bits: dict[str, bytes]
    run: ampscope.Run

    @classmethod
    def train(cls, loop: Loop, folder: Path, **options: Any) -> Watched:
        scopes: list[ampscope.Scope] = []

        def watch(model: Any, scaler: Any = None, **more: Any) -> ampscope.Scope:
            scopes.append(ampscope.watch(model, scaler, **{"dir": folder, "quiet": True, **options, **more}))
            return scopes[-1]

        seed_everything()
        before = _mode_stacks()
        try:
            state = loop(watch)
            state_bits = exact_state(state)
        finally:
            for scope in scopes:
                scope.close()
        assert _mode_stacks() == before
        return cls(state, state_bits, ampscope.open_run(folder))

    @property
    def steps(self) -> list[StepRow]:
        return self.run.rows(Table.STEPS)

    @property
    def incidents(self) -> list[IncidentRow]:
        return self.run.rows(Table.INCIDENTS)

    @property
    def findings(self) -> list[FindingRow]:
        return self.run.rows(Table.FINDINGS)

    @property
    def warnings(self) -> list[str]:
        """What AMPscope says of parts of its own that it had to switch off."""
        return [row.text for row in self.run.rows(Table.EVENTS, kind=EventKind.WARNING)]

    def replay_of(self, step: int, optimizer: int = 0) -> tuple[str, str]:
        """Status of the replay of the one incident at a step, and the reason given for it."""
        (row,) = (row for row in self.incidents if (row.step, row.optimizer) == (step, optimizer))
        return row.replay, row.replay_reason


def _mode_stacks() -> tuple[int, int]:
    """How many modes of each kind every call goes through: one that is left there slows down all that follows."""
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


def train_unwatched(loop: Loop) -> dict[str, bytes]:
    """Trains ``loop`` alone; returns the exact state it leaves."""
    seed_everything()
    return exact_state(loop(lambda *_args, **_options: None))


def train_both(loop: Loop, folder: Path, **options: Any) -> Watched:
    """Trains ``loop`` unwatched and watched, and asserts that no bit differs."""
    expected = train_unwatched(loop)
    watched = Watched.train(loop, folder, **options)
    differing = differences(watched.bits, expected)
    assert not differing, differing
    return watched


def seed_everything(seed: int = 0) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def exact_state(state: Any) -> dict[str, bytes]:
    """Every value in ``state`` and every random stream, bit for bit: NaNs compare equal, -0.0 differs from 0.0."""
    streams = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        generators = torch.get_device_module(accelerator)
        streams["accelerator"] = [generators.get_rng_state(i) for i in range(torch.accelerator.device_count())]
    return {name: _bits(value) for name, value in _leaves("", {"rng": streams, "state": state})}


def digest(bits: dict[str, bytes]) -> str:
    """An exact state in one word, for ranks to leave."""
    return hashlib.sha256(b"".join(bits[name] for name in sorted(bits))).hexdigest()


def differences(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        yield from _leaves(name, _module_state(value))
    elif isinstance(value, torch.optim.Optimizer | torch.amp.GradScaler):
        yield from _leaves(name, value.state_dict())
    elif isinstance(value, torch.Generator):
        yield name, value.get_state()
    elif isinstance(value, np.random.Generator):
        yield from _leaves(name, value.bit_generator.state)
    elif isinstance(value, random.Random):
        yield from _leaves(name, value.getstate())
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple | set | deque):
        yield f"{name}.len", len(value)
        for position, inner in enumerate(value):
            yield from _leaves(f"{name}.{position}", inner)
    elif value is None or isinstance(value, bool | int | float | str | Tensor | np.ndarray | torch.dtype):
        yield name, value


def _module_state(model: nn.Module) -> dict[str, Any]:
    modules = dict(model.named_modules())
    return {
        "parameters": dict(model.named_parameters()),
        "grads": {name: parameter.grad for name, parameter in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
        "training": {name: module.training for name, module in modules.items()},
        "attributes": {name: _attributes(module) for name, module in modules.items()},
    }


def _attributes(module: nn.Module) -> dict[str, Any]:
    own = {name: value for name, value in vars(module).items() if name not in _FURNITURE}
    return {name: value for name, value in own.items() if not isinstance(value, nn.Module)}


def _bits(value: Any) -> bytes:
    if isinstance(value, Tensor):
        dense = value.detach().to_dense() if value.is_sparse else value.detach()
        plain = dense.cpu().contiguous()
        return f"{plain.dtype} {tuple(plain.shape)} ".encode() + plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, float):
        return struct.pack("<d", value)
    return repr(value).encode()
