"""A bad step's replay is exact, and names the op, the module and the line that made the value."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_check.claim import Claim, be_deterministic, expect
from gpu_check.recorded import Row, first_bad, ops_of, rows
from gpu_check.trainings import STEEP, Gain, Loop, Transformer, watch

BLOCK = 2
MODULE = f"blocks.{BLOCK}.gain"
BAD = 12


def _line(text: str) -> int:
    lines, first = inspect.getsourcelines(Gain.forward)
    return first + next(number for number, line in enumerate(lines) if text in line)


def _gain(loop: Loop) -> Gain:
    gain = loop.model.get_submodule(MODULE)
    assert isinstance(gain, Gain)
    return gain


def _named(device: torch.device, build: Callable[[], nn.Module], *, in_backward: bool) -> str:
    be_deterministic()
    bad = 0 if in_backward else BAD
    loop = Loop(device, build, scale=2.0**16)
    scope = watch(loop)
    gain = _gain(loop)
    for step in range(bad + 1):
        gain.times = STEEP if step == bad else 1.0
        gain.over = STEEP if step == bad and in_backward else 1.0
        loop.step()
    scope.close()
    incidents = rows(scope.folder, "incidents", step=bad)
    expect(incidents, f"no incident at step {bad}")
    expect(
        incidents[0]["replay"] == "exact", f"the replay is {incidents[0]['replay']}: {incidents[0]['replay_reason']}"
    )
    origin = first_bad(scope.folder, bad)
    expect(origin, "no op of the replay gave a value that is not finite")
    assert origin is not None
    _check_place(origin, "backward" if in_backward else "forward")
    return f"{origin['op']} in {origin['module']}, line {origin['line']}, {origin['phase']}"


def _check_place(origin: Row, phase: str) -> None:
    expected = (MODULE, _line("self.times"), "aten.mul.Tensor")
    seen = (origin["module"], origin["line"], origin["op"])
    expect(seen == expected, f"named {seen} instead of {expected}")
    accepted = ("forward", "recompute") if phase == "forward" else (phase,)
    expect(origin["phase"] in accepted, f"{origin['phase']} instead of {phase}")


def _same_attention(device: torch.device) -> str:
    """The kernel that a context chooses round the call runs in the replay too."""
    loop = Loop(device)
    scope = watch(loop, every=1)
    for step in range(BAD + 1):
        _gain(loop).times = STEEP if step == BAD else 1.0
        with sdpa_kernel(SDPBackend.MATH):
            loop.forward_backward()
        loop.finish()
    scope.close()
    (incident,) = rows(scope.folder, "incidents", step=BAD)
    expect(incident["replay"] == "exact", f"the replay is {incident['replay']}: {incident['replay_reason']}")
    live, replay = (
        _attention(ops_of(scope.folder, step, source)) for step, source in ((BAD - 1, "live"), (BAD, "replay"))
    )
    expect(live == replay, f"the step ran {live}, its replay {replay}")
    return ", ".join(sorted(live))


def _attention(ops: list[str]) -> set[str]:
    return {op for op in ops if "attention" in op or "softmax" in op}


def _of(*, reentrant: bool | None = None, in_backward: bool = False) -> Callable[[torch.device], str]:
    return lambda device: _named(device, partial(Transformer, reentrant=reentrant), in_backward=in_backward)


CLAIMS = (
    Claim("named", "an overflow in a block's forward, with dropout and SDPA, is replayed exactly and named", _of()),
    Claim("named-backward", "so is one that is born in backward, at a process's first step", _of(in_backward=True)),
    Claim("named-checkpoint", "the same with checkpointing", _of(reentrant=False)),
    Claim("named-checkpoint-backward", "in its backward too", _of(reentrant=False, in_backward=True)),
    Claim("named-reentrant", "the same with reentrant checkpointing", _of(reentrant=True)),
    Claim("named-reentrant-backward", "in its backward too", _of(reentrant=True, in_backward=True)),
    Claim("same-attention", "an attention kernel chosen round the call runs in the replay too", _same_attention),
)
