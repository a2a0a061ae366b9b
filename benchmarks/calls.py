"""Calls of Python that watching adds to a step, by what the loop does: the same on every machine, and on a busy one.

    python benchmarks/calls.py                          # the table, a minute or two
    python benchmarks/calls.py --loops scaler,bf16_clip --sizes 79,295,1003
    python benchmarks/calls.py --who scaler_clip        # which functions make them

Counted with ``sys.setprofile`` in the training thread, in steps 133 to 140 of a run with default settings, of which
none is traced but in the loop that asks for it: the median, watched minus unwatched. Times are measured by
``overhead.py``.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import itertools
import json
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from workload import CLASSES, FRAME, Block, Size, Transformer

import ampscope

RESULTS = Path(__file__).parent / "results" / "calls.json"
#: Steps that are counted: between two powers of two, and none is traced or, of a traced loop, has every statistic.
COUNTED = range(133, 141)
#: Steps before them of an unwatched loop, in which nothing is learnt.
WARM = 3
#: Layers by the number of parameter tensors that the model has with them.
LAYERS = {79: 6, 295: 24, 1003: 83}

Step = Callable[[], object]
Counts = collections.Counter[str]


class Loop:
    """A training loop with a model of so many layers; subclasses say what it does in a step."""

    dtype = torch.float16
    scales = True

    def __init__(self, layers: int) -> None:
        torch.manual_seed(0)
        size = Size(width=16, layers=layers, heads=2, batch=2, length=8)
        self.model: nn.Module = self.wrapped(Transformer(size))
        self.weights: list[Tensor] = list(self.model.parameters())
        self.optimizer = self.make_optimizer()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=self.scales)
        self.frames = torch.randn(size.batch, size.length, FRAME)
        self.labels = torch.randint(0, CLASSES, (size.batch, size.length))
        self.prepare()

    def wrapped(self, model: nn.Module) -> nn.Module:
        return model

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.weights, lr=1e-4)

    def prepare(self) -> None:
        """What a loop has beside its model."""

    def watch(self, folder: Path) -> contextlib.AbstractContextManager[object]:
        return ampscope.watch(self.model, self.scaler if self.scales else None, dir=folder, quiet=True)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.after_backward()
        self.update()

    def backward(self) -> None:
        with torch.autocast("cpu", dtype=self.dtype):
            loss = self.loss(self.model(self.frames))
        self.scaler.scale(loss).backward()

    def loss(self, logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), self.labels.flatten())

    def after_backward(self) -> None:
        """Between backward and the optimizer."""

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Bf16(Loop):
    dtype, scales = torch.bfloat16, False

    def backward(self) -> None:
        with torch.autocast("cpu", dtype=self.dtype):
            loss = self.loss(self.model(self.frames))
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()


class ScalerClip(Loop):
    foreach: bool | None = None

    def after_backward(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.weights, 1.0, foreach=self.foreach)


class ScalerClipTraced(ScalerClip):
    """Each step is traced op by op."""

    def watch(self, folder: Path) -> contextlib.AbstractContextManager[object]:
        return ampscope.watch(self.model, self.scaler, dir=folder, quiet=True, every=1)


class ScalerClipForLoop(ScalerClip):
    foreach = False


class ScalerClipValue(Loop):
    def after_backward(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_value_(self.weights, 1.0)


class Bf16Clip(Bf16):
    def after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.weights, 1.0)


class Bf16ClipForLoop(Bf16):
    def after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.weights, 1.0, foreach=False)


class ScalerLog(Loop):
    def after_backward(self) -> None:
        self.scaler.unscale_(self.optimizer)
        self.logged = [p.grad.norm().item() for p in self.weights if p.grad is not None]


class Bf16Log(Bf16):
    def after_backward(self) -> None:
        self.logged = [p.grad.norm().item() for p in self.weights if p.grad is not None]


class Accumulate(ScalerClip):
    def step(self) -> None:
        self.optimizer.zero_grad()
        for _ in range(4):
            with torch.autocast("cpu", dtype=self.dtype):
                loss = self.loss(self.model(self.frames)) / 4
            self.scaler.scale(loss).backward()
        self.after_backward()
        self.update()


class Target(ScalerClip):
    """Reinforcement learning: a target network follows the model, in place, parameter by parameter."""

    def prepare(self) -> None:
        self.target = copy.deepcopy(self.model)

    def step(self) -> None:
        with torch.no_grad():
            aim = self.target(self.frames)
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=self.dtype):
            loss = nn.functional.mse_loss(self.model(self.frames), aim)
        self.scaler.scale(loss).backward()
        self.update()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.weights, strict=True):
                slow.mul_(0.99)
                slow.add_(fast, alpha=0.01)


class Average(Loop):
    def prepare(self) -> None:
        self.average = [p.detach().clone() for p in self.weights]

    def step(self) -> None:
        super().step()
        with torch.no_grad():
            torch._foreach_lerp_(self.average, self.weights, 0.01)


class Swa(Loop):
    def prepare(self) -> None:
        self.average = torch.optim.swa_utils.AveragedModel(self.model)

    def step(self) -> None:
        super().step()
        self.average.update_parameters(self.model)


class Gan(Loop):
    """Two models take turns; the generator alone is watched."""

    def prepare(self) -> None:
        self.critic = nn.Sequential(nn.Linear(CLASSES, 8), *(Block(8, 2) for _ in range(6)), nn.Linear(8, 1))
        self.of_critic = torch.optim.AdamW(self.critic.parameters(), lr=1e-4)

    def step(self) -> None:
        with torch.autocast("cpu", dtype=self.dtype):
            fake = self.model(self.frames)
            told = self.critic(fake.detach())
            loss = nn.functional.softplus(told).mean() + nn.functional.softplus(-self.critic(fake.detach() + 1)).mean()
        self.of_critic.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.of_critic)
        with torch.autocast("cpu", dtype=self.dtype):
            loss = nn.functional.softplus(-self.critic(fake)).mean()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.update()


class GanBoth(Gan):
    def watch(self, folder: Path) -> contextlib.AbstractContextManager[object]:
        return ampscope.watch([self.model, self.critic], self.scaler, dir=folder, quiet=True)


class Evaluating(Loop):
    def prepare(self) -> None:
        self.steps = itertools.count(1)

    def step(self) -> None:
        super().step()
        if next(self.steps) % 20 == 0:
            self.model.eval()
            with torch.no_grad(), torch.autocast("cpu", dtype=self.dtype):
                for _ in range(50):
                    self.loss(self.model(self.frames))
            self.model.train()


class Metrics(Loop):
    def loss(self, logits: Tensor) -> Tensor:
        loss = super().loss(logits)
        with torch.no_grad():
            self.right = (logits.softmax(-1).argmax(-1) == self.labels).float().mean().item()
        return loss


class GradientPenalty(Bf16):
    """The square of each parameter's gradient is a part of the loss: some three hundred functions of the loop's own."""

    def backward(self) -> None:
        with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", dtype=self.dtype):  # the others have one derivative
            loss = self.loss(self.model(self.frames))
        slopes = torch.autograd.grad(loss, self.weights, create_graph=True)
        penalty = loss.new_zeros(())
        for slope in slopes:
            penalty = penalty + slope.pow(2).sum()
        (loss + 0.01 * penalty).backward()


class Fused(Loop):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.weights, lr=1e-4, fused=True)


class Foreach(Loop):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.weights, lr=1e-4, foreach=True)


class Sgd(Bf16):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.weights, lr=1e-4)


class Compiled(Loop):
    def wrapped(self, model: nn.Module) -> nn.Module:
        return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]  # torch types it as a function


LOOPS: dict[str, type[Loop]] = {
    "scaler": Loop,
    "scaler_clip": ScalerClip,
    "scaler_clip_traced": ScalerClipTraced,
    "scaler_clip_for_loop": ScalerClipForLoop,
    "scaler_clip_value": ScalerClipValue,
    "scaler_log_norms": ScalerLog,
    "bf16": Bf16,
    "bf16_clip": Bf16Clip,
    "bf16_clip_for_loop": Bf16ClipForLoop,
    "bf16_log_norms": Bf16Log,
    "accumulate_4_clip": Accumulate,
    "rl_soft_target": Target,
    "gan_one_watched": Gan,
    "gan_both_watched": GanBoth,
    "gradient_penalty_bf16": GradientPenalty,
    "adamw_fused": Fused,
    "adamw_foreach": Foreach,
    "sgd_bf16": Sgd,
    "ema": Average,
    "swa": Swa,
    "evaluation": Evaluating,
    "metrics": Metrics,
    "compiled": Compiled,
}


def counted(step: Step, who: Counts | None = None) -> int:
    """Calls of Python functions in one step; by function into ``who``, if that is given."""
    calls = 0

    def heard(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        if event == "call":
            calls += 1
            if who is not None:
                who[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"] += 1

    sys.setprofile(heard)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def steady(loop: Loop, *, watched: bool, who: Counts | None = None, steps: range = COUNTED) -> list[int]:
    """Counts the calls of each of these steps."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if watched:
            stack.enter_context(loop.watch(Path(folder) / "run"))
        for _ in range(steps.start if watched else WARM):
            loop.step()
        return [counted(loop.step, who) for _ in steps]


def added(kind: type[Loop], tensors: int, steps: range = COUNTED) -> tuple[int, int]:
    """Counts the calls of an unwatched step, and those that watching adds to it."""
    unwatched = statistics.median_low(steady(kind(LAYERS[tensors]), watched=False, steps=steps))
    watched = statistics.median_low(steady(kind(LAYERS[tensors]), watched=True, steps=steps))
    return unwatched, watched - unwatched


def table(loops: Sequence[str], sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    for name in loops:
        row: dict[str, Any] = {"loop": name}
        for tensors in sizes:
            row[str(tensors)] = dict(zip(("unwatched", "added"), added(LOOPS[name], tensors), strict=True))
        cells = (f"{row[str(n)]['unwatched']:>8,} +{row[str(n)]['added']:>9,}" for n in sizes)
        print(f"{name:<24}" + "  ".join(cells), flush=True)
        yield row


def _names(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", type=_names, default=list(LOOPS), help="comma-separated; all without it")
    parser.add_argument("--sizes", type=_names, default=["79", "295"], help="parameter tensors: 79, 295, 1003")
    parser.add_argument("--who", metavar="LOOP", help="print the functions that one loop's watching adds")
    parser.add_argument("--save", type=Path, nargs="?", const=RESULTS, help="write the table as JSON")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    sizes = [int(size) for size in given.sizes]
    if given.who:
        seen: Counts = collections.Counter()
        before: Counts = collections.Counter()
        steady(LOOPS[given.who](LAYERS[sizes[0]]), watched=False, who=before)
        steady(LOOPS[given.who](LAYERS[sizes[0]]), watched=True, who=seen)
        seen.subtract(before)
        for name, calls in seen.most_common(60):
            print(f"{calls / len(COUNTED):10.1f}  {name}")
        return
    print(f"{'loop':<24}" + "  ".join(f"{size:>8} +    added" for size in sizes))
    rows = list(table(given.loops, sizes))
    if given.save:
        given.save.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
