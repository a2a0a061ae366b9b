"""What watching costs on the device: GPT-2 in both half precisions, and a ResNet whose steps are bound by launches.

Variants take turns in short blocks within one process; a ratio is taken within a round. Memory is how far a block's
peak rises above what was allocated before it, beyond the unwatched block's.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ampscope
from ampscope.capture.tracing.full_statistics import Census, FusedLook, has_triton
from gpu_check.models import GPT2, ResNet

#: Steps before any is timed: past those at a run's start in which AMPscope looks closely.
WARM_UP = 12
BLOCK = 4
INCIDENTS = 4
UNWATCHED, DEFAULT, EVERY, ANOMALY = "unwatched", "ampscope", "ampscope every=1", "detect_anomaly"


@dataclass(frozen=True, slots=True)
class Setting:
    """A training that is measured."""

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    half: torch.dtype
    rounds: int


def settings(*, tiny: bool) -> dict[str, Setting]:
    """By title; ``tiny`` ones run anywhere, and only show that all of this works."""
    gpt, images = (GPT2.tiny, ResNet.tiny) if tiny else (GPT2, ResNet)
    rounds, words = (2, GPT2.FEW_WORDS) if tiny else (12, GPT2.WORDS)
    tokens, pictures = ((2, 16), (2, 3, 32, 32)) if tiny else ((8, 1024), (16, 3, 64, 64))

    def text() -> tuple[Tensor, ...]:
        return (torch.randint(0, words, tokens),)

    def classes() -> tuple[Tensor, ...]:
        return torch.randn(pictures), torch.randint(0, ResNet.CLASSES, (pictures[0],))

    name = "tiny " if tiny else ""
    return {
        f"{name}GPT-2 124M, float16, scaler": Setting(gpt, text, torch.float16, rounds),
        f"{name}GPT-2 124M, bfloat16": Setting(gpt, text, torch.bfloat16, rounds),
        f"{name}ResNet-50, 16 pictures of 64 x 64, float16, scaler": Setting(images, classes, torch.float16, rounds),
    }


class Training:
    """A model that gives its loss, trained as a tutorial does."""

    def __init__(self, setting: Setting, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device, self.half = device, setting.half
        self.model = setting.build().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8, enabled=setting.half is torch.float16)
        self.batch = tuple(tensor.to(device) for tensor in setting.batch())

    def step(self, trip: float = 1.0) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, dtype=self.half):
            loss = self.model(*self.batch, trip=trip)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


@dataclass(slots=True)
class Variant:
    """A training and who looks on."""

    training: Training
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    seconds: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def run(self, steps: int, trip: float = 1.0) -> float:
        """Takes some steps; seconds for each."""
        device = self.training.device
        wait(device)
        before = _peak_from_here(device)
        start = time.perf_counter()
        with self.around():
            for _ in range(steps):
                self.training.step(trip)
        wait(device)
        took = (time.perf_counter() - start) / steps
        self.memory.append(_peak(device) - before)
        return took


def wait(device: torch.device) -> None:
    """Returns when the device has done all that it was asked to do."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def _peak_from_here(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def measure(setting: Setting, device: torch.device) -> dict[str, Any]:
    """Rows by name: each variant, and an incident."""
    with tempfile.TemporaryDirectory(prefix="ampscope-gpu-check-") as folder:
        variants, scopes = _variants(setting, device, Path(folder))
        for variant in variants.values():
            variant.run(WARM_UP)
            variant.memory.clear()
        for _ in range(setting.rounds):
            for variant in variants.values():
                variant.seconds.append(variant.run(BLOCK))
        rows = {name: _row(variant, variants[UNWATCHED]) for name, variant in variants.items()}
        if setting.half is torch.float16:  # without a scaler, a bad step would spoil the weights
            rows["an incident, in steps"] = _incident(variants[DEFAULT], variants[UNWATCHED])
        for scope in scopes:
            scope.close()
    return rows


def _variants(setting: Setting, device: torch.device, folder: Path) -> tuple[dict[str, Variant], list[Any]]:
    def anomaly() -> AbstractContextManager[object]:
        return torch.autograd.set_detect_anomaly(True, check_nan=True)

    variants = {name: Variant(Training(setting, device)) for name in (UNWATCHED, DEFAULT, EVERY)}
    variants[ANOMALY] = Variant(Training(setting, device), anomaly)
    options: dict[str, dict[str, Any]] = {DEFAULT: {}, EVERY: {"every": 1}}
    scopes = []
    for number, (name, more) in enumerate(options.items()):
        training = variants[name].training
        scopes.append(ampscope.watch(training.model, training.scaler, dir=folder / str(number), quiet=True, **more))
    return variants, scopes


def _row(variant: Variant, unwatched: Variant) -> dict[str, Any]:
    ratios = [mine / theirs for mine, theirs in zip(variant.seconds, unwatched.seconds, strict=True)]
    return {
        "step_ms": statistics.median(variant.seconds) * 1e3,
        "ratio": statistics.quantiles(ratios, n=4, method="inclusive"),
        "memory": max(variant.memory) - max(unwatched.memory) if unwatched.training.device.type == "cuda" else None,
    }


LOOKS = "how long it takes to look at a half-precision tensor: torch's kernels, and AMPscope's own"


def looks(device: torch.device) -> dict[str, Any]:
    """Rows by size: AMPscope's own kernel beside torch's, for tensors that are finite and that are not."""
    if device.type != "cuda" or not has_triton():
        return {"": {"skipped": "needs CUDA and Triton"}}
    rows = {}
    for elements in (2**12, 2**20, 2**26):
        for name, value in (("finite", 1.0), ("with an inf", float("inf"))):
            tensor = torch.full((elements,), 0.5, device=device, dtype=torch.float16)
            tensor[-1] = value
            pairs = [(_looked(tensor, fused=True), _looked(tensor, fused=False)) for _ in range(8)]
            ratios = [ours / torchs for ours, torchs in pairs[1:]]
            rows[f"{elements} elements, {name}"] = {
                "step_ms": statistics.median(ours for ours, _ in pairs[1:]) * 1e3,
                "ratio": statistics.quantiles(ratios, n=4, method="inclusive"),
            }
    return rows


def _looked(tensor: Tensor, *, fused: bool, times: int = 64) -> float:
    """Seconds for one look, of as many as a small replay takes."""
    wait(tensor.device)
    start = time.perf_counter()
    if fused:
        own = FusedLook(tensor.device)
        for _ in range(times):
            own.look(tensor)
        own.read()
    else:
        census = Census()
        for _ in range(times):
            census.look(tensor)
    wait(tensor.device)
    return (time.perf_counter() - start) / times


def _incident(watched: Variant, unwatched: Variant) -> dict[str, Any]:
    """What a bad step takes longer than an unwatched bad one, in unwatched steps; the first is not counted."""
    usual = statistics.median(unwatched.seconds)
    extra = []
    for _ in range(INCIDENTS):
        for variant in (unwatched, watched):
            variant.run(2)
        extra.append((watched.run(1, trip=1e6) - unwatched.run(1, trip=1e6)) / usual)
    low, middle, high = statistics.quantiles(extra[1:], n=4, method="inclusive")
    more = max(watched.memory) - max(unwatched.memory) if watched.training.device.type == "cuda" else None
    return {"step_ms": middle * usual * 1e3, "ratio": [low, middle, high], "memory": more}
