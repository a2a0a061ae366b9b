"""What half precision loses in a transformer without a NaN is named; where float32 has the same, nothing is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampscope
from ampscope.analysis.results import Diagnosis
from ampscope.trace.vocabulary import Cause, Severity, Verdict
from tests.integration.planted_faults.conftest import PLANTED
from tests.integration.planted_faults.models import ARCHITECTURES, WIDTH, Architecture
from tests.integration.planted_faults.table import BF16, FP16
from tests.integration.planted_faults.training import CALIBRATED, Loop

STEPS = 6

Insert = Callable[[nn.Module], nn.Module]


class BehindNorm(nn.Module):
    """Stands in for a norm, and does something with its result."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    @property
    def weight(self) -> Tensor:
        weight = self.norm.weight
        assert isinstance(weight, Tensor)
        return weight


class Gate(BehindNorm):
    """A learned gate whose operand is moved: half precision rounds a sigmoid to 1 long before float32 does."""

    def __init__(self, norm: nn.Module, *, moved: float) -> None:
        super().__init__(norm)
        self.gate, self.moved = nn.Linear(WIDTH, WIDTH), moved

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x * (self.gate(x) + self.moved).sigmoid()


class Choice(BehindNorm):
    """A learned choice among features whose first is preferred: float16 rounds what is left of the others to 0."""

    preferred: Tensor

    def __init__(self, norm: nn.Module, *, by: float) -> None:
        super().__init__(norm)
        self.scores = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("preferred", F.one_hot(torch.tensor(0), WIDTH) * by, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        scores = self.scores(x)
        return x + (scores + self.preferred.to(scores.dtype)).softmax(-1) * x


class Branch(BehindNorm):
    """A branch that begins small: below what float16 holds, its gradients are zero."""

    def __init__(self, norm: nn.Module, *, factor: float) -> None:
        super().__init__(norm)
        self.branch, self.factor = nn.Linear(WIDTH, WIDTH), factor

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + self.branch(x) * self.factor


class Centred(BehindNorm):
    """Subtracts a running mean, which is far from where it is heading at first."""

    seen: Tensor

    def __init__(self, norm: nn.Module, *, dtype: torch.dtype) -> None:
        super().__init__(norm)
        self.register_buffer("seen", torch.full((WIDTH,), 2.0, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.training:
            with torch.no_grad():
                self.seen.mul_(0.999).add_(x.flatten(0, -2).mean(0).to(self.seen.dtype), alpha=0.001)
        return x - self.seen


class Timed(BehindNorm):
    """Adds a wave of each token's time, counted from a start; bfloat16 holds whole numbers up to 256 apart."""

    def __init__(self, norm: nn.Module, *, start: int) -> None:
        super().__init__(norm)
        self.start = start

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        times = torch.arange(self.start, self.start + x[..., 0].numel()).to(torch.bfloat16)
        return x + (times.view(x.shape[:-1]).unsqueeze(-1) * 0.01).sin()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What is lost, and its twin that loses nothing."""

    name: str
    dtype: torch.dtype
    insert: Insert
    twins: dict[str, Insert]
    causes: tuple[Cause, ...]
    op: str
    phase: str = "forward"

    def __str__(self) -> str:
        return self.name


LOSSES = (
    Loss(
        name="saturated gate",
        dtype=FP16,
        insert=partial(Gate, moved=12.0),
        twins={"open": partial(Gate, moved=0.0), "saturated in float32 too": partial(Gate, moved=300.0)},
        causes=(Cause.STAGNATION,),
        op="aten.sigmoid.default",
    ),
    Loss(
        name="saturated choice",
        dtype=FP16,
        insert=partial(Choice, by=20.0),
        twins={"open": partial(Choice, by=0.0), "saturated in float32 too": partial(Choice, by=300.0)},
        causes=(Cause.STAGNATION,),
        op="aten._softmax.default",
    ),
    Loss(
        name="branch below float16",
        dtype=FP16,
        insert=partial(Branch, factor=1e-9),
        twins={"ordinary": partial(Branch, factor=1e-2), "closed": partial(Branch, factor=0.0)},
        causes=(Cause.FP16_UNDERFLOW, Cause.STAGNATION),
        op="aten.mul.Tensor",
        phase="backward",
    ),
    Loss(
        name="running mean in bfloat16",
        dtype=BF16,
        insert=partial(Centred, dtype=BF16),
        twins={"in float32": partial(Centred, dtype=torch.float32)},
        causes=(Cause.BF16_PRECISION,),
        op="aten.add_.Tensor",
    ),
    Loss(
        name="times in bfloat16",
        dtype=BF16,
        insert=partial(Timed, start=4000),
        twins={"few enough": partial(Timed, start=0)},
        causes=(Cause.INFORMATION_LOST,),
        op="aten._to_copy.default",
    ),
)


def trained(where: Architecture, dtype: torch.dtype, insert: Insert, folder: Path) -> Diagnosis:
    torch.manual_seed(0)
    model: Any = where.build()
    model.set_submodule(where.norm, insert(model.get_submodule(where.norm)))
    loop = Loop.of(model, dtype, init_scale=CALIBRATED)
    with ampscope.watch(model, loop.scaler, dir=folder, quiet=True):
        for _ in range(STEPS):
            loop.step(where.batch())
    return ampscope.diagnose(folder)


def _everywhere(cases: list[tuple[Any, ...]]) -> Iterator[Any]:
    """Each in every model: in one of them in the ordinary run."""
    for number, case in enumerate(cases):
        for where in ARCHITECTURES:
            quick = where is ARCHITECTURES[number % len(ARCHITECTURES)]
            name = "-".join(map(str, (*case, where)))
            yield pytest.param(*case, where, id=name, marks=() if quick else pytest.mark.plants_full)


@pytest.mark.parametrize(("lost", "where"), list(_everywhere([(each,) for each in LOSSES])))
def test_what_is_lost_is_named(
    lost: Loss, where: Architecture, run_folder: Path, record_property: Callable[[str, str], None]
) -> None:
    record_property(PLANTED, str(lost))
    primary: Any = trained(where, lost.dtype, lost.insert, run_folder).primary
    assert primary is not None
    assert primary.cause in lost.causes
    assert (primary.op, primary.phase) == (lost.op, lost.phase)
    assert primary.module.startswith(where.norm)


@pytest.mark.parametrize(
    ("lost", "twin", "where"), list(_everywhere([(each, name) for each in LOSSES for name in each.twins]))
)
def test_its_twin_is_quiet(
    lost: Loss, twin: str, where: Architecture, run_folder: Path, record_property: Callable[[str, str], None]
) -> None:
    record_property(PLANTED, "")
    diagnosis = trained(where, lost.dtype, lost.twins[twin], run_folder)
    assert diagnosis.verdict is Verdict.HEALTHY
    assert [each for each in diagnosis.incidents if each.severity is not Severity.INFO] == []
