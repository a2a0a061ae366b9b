"""A claim about a GPU, and how it came out."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch


class Outcome(StrEnum):
    """How a claim came out."""

    HOLDS = "holds"
    WRONG = "WRONG"
    SKIPPED = "skipped"


class Wrong(Exception):
    """The claim does not hold; the message says what was seen instead."""


class Skipped(Exception):
    """The claim cannot be asked here; the message says why."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that is true where AMPscope works.

    Args:
        name: By which it can be asked for alone.
        says: What is claimed, in one line.
        check: Asks it on a device. Returns what was seen, in a few words; raises `Wrong` or `Skipped`.
        limit_s: It is wrong if it takes longer; seconds.
    """

    name: str
    says: str
    check: Callable[[torch.device], str]
    limit_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """How one claim came out, with what was seen; seconds."""

    name: str
    says: str
    outcome: Outcome
    seen: str
    seconds: float


def need_cuda(device: torch.device, why: str) -> None:
    """Skips a claim about CUDA alone; ``why`` goes on after "needs CUDA: "."""
    if device.type != "cuda":
        raise Skipped(f"needs CUDA: {why}")


def another_device(device: torch.device) -> torch.device:
    """A second device of the same kind; skips the claim where there is none."""
    kind = torch.get_device_module(device)
    if device.type == "cpu" or kind.device_count() < 2:
        raise Skipped("needs a second device of this kind")
    return torch.device(device.type, 1)


def expect(truth: object, otherwise: str) -> None:
    """Raises `Wrong` unless ``truth``."""
    if not truth:
        raise Wrong(otherwise)


def be_deterministic() -> None:
    """Two unwatched trainings have to agree before a watched one can be held against them."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
