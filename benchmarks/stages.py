"""Where a variant runs: in this process, or in one of its own that waits for its turns."""

from __future__ import annotations

import multiprocessing
import os
import platform
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from variants import VARIANTS, Unavailable, Variant
from workload import SIZES, Place


@dataclass(frozen=True, slots=True)
class Block:
    """How long a block of steps took, in seconds a step."""

    wall: float
    cpu: float  #: of all the process's threads, so a writer in the background counts


class Stage(Protocol):
    """Something that runs a variant's steps, here or in another process."""

    def run(self, steps: int) -> Block: ...

    def close(self) -> dict[str, Any]: ...


class Here:
    """A variant in this process."""

    def __init__(self, name: str, size: str, place: Place) -> None:
        self.variant: Variant = VARIANTS[name](SIZES[size], place)

    def run(self, steps: int) -> Block:
        with self.variant.around_block():
            self.variant.training.place.wait()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                self.variant.step()
            self.variant.training.place.wait()
            return Block((time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps)

    def close(self) -> dict[str, Any]:
        return self.variant.close()


class Elsewhere:
    """A variant in a process of its own, which stays and waits for its turns.

    Args:
        tree: Another checkout, whose ``ampscope`` is imported there; this one's where it is None.
    """

    def __init__(self, name: str, size: str, place: Place, tree: Path | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, end = context.Pipe()
        self.process = context.Process(target=_serve, args=(end, name, size, place, tree), daemon=True)
        self.process.start()
        self._answer()

    def run(self, steps: int) -> Block:
        self.pipe.send(steps)
        block: Block = self._answer()
        return block

    def close(self) -> dict[str, Any]:
        self.pipe.send(0)
        facts: dict[str, Any] = self._answer()
        self.process.join()
        return facts

    def _answer(self) -> Any:
        answer = self.pipe.recv()
        if isinstance(answer, Unavailable):
            raise answer
        return answer


def _serve(pipe: Connection, name: str, size: str, place: Place, tree: Path | None) -> None:
    if tree is not None:
        sys.path.insert(0, str(tree.resolve()))
    torch.set_num_threads(place.threads)
    try:
        stage = Here(name, size, place)
    except Unavailable as reason:
        pipe.send(reason)
        return
    pipe.send("ready")
    while steps := pipe.recv():
        pipe.send(stage.run(steps))
    memory = peak_memory(place)
    pipe.send(stage.close() | memory)


def peak_memory(place: Place) -> dict[str, int]:
    """The most memory this process has taken so far; bytes."""
    if place.device == "cuda":
        return {"peak_device_bytes": torch.cuda.max_memory_allocated()}
    status = Path("/proc/self/status")
    if not status.exists():
        return {}
    # Not getrusage: its maximum is inherited from the process that started this one.
    (peak,) = (line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return {"peak_resident_bytes": int(peak) * 1024}


def machine(place: Place) -> dict[str, Any]:
    """What a reader needs to judge the numbers; nothing that names the machine."""
    return {
        "device": torch.cuda.get_device_name() if place.device == "cuda" else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "dtype": str(place.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
