"""How a loop is run: unwatched, with notes of what it does to its weights, or watched by AMPscope."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from operator import ge
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import ampscope
from ampscope.analysis.results import Diagnosis
from tests.mutation.hosts import STEPS

SCALE = 2.0**10


@dataclass(frozen=True, slots=True)
class Lane:
    """The arithmetic that a loop is run in."""

    half: torch.dtype | None  #: what autocast casts to; None without autocast
    scale: float = SCALE
    seed: int = 0


@dataclass(slots=True)
class Notes:
    """What a loop did, iteration by iteration."""

    weights: list[Tensor] = field(default_factory=list)  #: of all models, flat, before the loop and after each turn
    finite: list[bool] = field(default_factory=list)  #: whether losses and gradients were, and no scale fell
    error: Exception | None = None


@contextmanager
def _apart() -> Iterator[None]:
    """Leaves random numbers and the warnings of the process as they were."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _execute(source: str, file: Path, lane: Lane, *, steps: Any, watch: Callable[..., object], names: Any) -> None:
    names |= {"__name__": "loop", "SEED": lane.seed, "SCALE": lane.scale, "STEPS": steps, "watch": watch}
    names |= {"AMP": lane.half is not None, "HALF": lane.half or torch.bfloat16}
    exec(compile(source, str(file), "exec"), names)  # noqa: S102  # a loop of `hosts`, or a mutant of one


def run(source: str, lane: Lane, *, at: Callable[[int], None] = lambda _: None, file: Path = Path("loop.py")) -> Notes:
    """Runs a loop unwatched; ``at`` is called as each iteration begins."""
    notes, names, models = Notes(), dict[str, Any](), list[nn.Module]()

    def look() -> None:
        held = [p.detach().flatten().double() for model in models for p in model.parameters()]
        notes.weights.append(torch.cat(held))

    def iterations() -> Iterator[int]:
        scale: list[float] = []
        look()
        for number in range(STEPS):
            at(number)
            yield number
            losses = [each for each in names.values() if isinstance(each, Tensor) and each.grad_fn is not None]
            gradients = [p.grad for model in models for p in model.parameters() if p.grad is not None]
            scalars = [each for each in losses if each.ndim == 0]
            scales = [each.get_scale() for each in names.values() if isinstance(each, torch.amp.GradScaler)]
            whole = all(bool(each.isfinite().all()) for each in [*scalars, *gradients])
            notes.finite.append(whole and all(map(ge, scales, scale)))
            scale = scales
            look()

    def taken(model: Any, *_: object) -> None:
        models.extend(model if isinstance(model, list) else [model])

    try:
        with _apart():
            _execute(source, file, lane, steps=iterations(), watch=taken, names=names)
    except Exception as error:  # noqa: BLE001  # a mutant may raise anything
        notes.error = error
    assert not notes.weights or any(isinstance(each, Optimizer) for each in names.values())
    return notes


def watched(source: str, lane: Lane, folder: Path) -> Diagnosis:
    """Runs a loop under watch, and gives what AMPscope says of it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "loop.py"
    file.write_text(source, "utf-8")
    with suppress(Exception), ExitStack() as scopes, _apart(), redirect_stderr(io.StringIO()):

        def watch(*args: Any) -> None:
            scopes.enter_context(ampscope.watch(*args, dir=folder / "run", quiet=True))

        _execute(source, file, lane, steps=range(STEPS), watch=watch, names={})
    return ampscope.diagnose(folder / "run")
