"""Casts to half precision that a loop makes before the model is called, with their harmless twins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.trace.vocabulary import Cause, Verdict

_WIDTH = 4


class Encoded(nn.Module):
    """Waves of the first column, beside the others."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(_WIDTH + 1, 1)

    def forward(self, given: Tensor) -> Tensor:
        wide = given.float()
        rest = wide[:, 1:] if wide.dim() > 1 else wide.new_ones(len(wide), _WIDTH - 1)
        first = wide[:, :1] if wide.dim() > 1 else wide[:, None]
        return self.out(torch.cat([(first / 7).sin(), (first / 7).cos(), rest], 1))


class LookedUp(nn.Module):
    """Rows of a table by the first column."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20_000, _WIDTH), nn.Linear(_WIDTH, 1)

    def forward(self, given: Tensor) -> Tensor:
        return self.out(self.table(given[:, 0].long()))


class Unread(nn.Module):
    """All columns but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(_WIDTH - 1, 1)

    def forward(self, given: Tensor) -> Tensor:
        return self.out(given[:, 1:].float())


def trained(model: nn.Module, batch: Callable[[], Tensor], folder: Path) -> Diagnosis:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ampscope.watch(model, dir=folder, quiet=True):
        for _ in range(4):
            given = batch()
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(given).float().square().mean()
            loss.backward()
            optimizer.step()
    return ampscope.diagnose(folder)


def packed(low: int, high: int) -> Tensor:
    ids = torch.randint(low, high, (256,))
    return torch.cat([ids[:, None].float(), torch.randn(256, _WIDTH - 1)], 1)


def late_minutes() -> Tensor:
    return torch.randint(8640, 10080, (256,)).to(torch.bfloat16)


def moved_afterwards() -> Tensor:
    late = late_minutes()
    return torch.stack([late, *[torch.ones_like(late)] * (_WIDTH - 1)], 1).clone()


def counted_out() -> Tensor:
    return torch.arange(700, dtype=torch.bfloat16)


def waves_of_a_grid() -> Tensor:
    return (counted_out().float() / 7).sin()


def mask_of_a_grid() -> Tensor:
    return (counted_out() < 300).float()


def shifted_ids(low: int) -> Tensor:
    return (torch.randint(low, low + 900, (256, 1)).half() + 1).long()


_PICKED = "as an index these pick other rows"


@pytest.mark.parametrize(
    ("model", "batch", "op", "says", "since"),
    [
        (Encoded, late_minutes, "aten._to_copy.default", " become ", 0),
        (Encoded, moved_afterwards, "aten._to_copy.default", " become ", 0),
        (Encoded, counted_out, "aten.arange.start_step", " become ", 0),
        (Encoded, waves_of_a_grid, "aten.arange.start_step", " become ", 1),
        (LookedUp, lambda: packed(16_400, 17_300).half(), "aten._to_copy.default", _PICKED, 0),
        (LookedUp, lambda: shifted_ids(16_400), "aten._to_copy.default", _PICKED, 1),
    ],
    ids=["minutes", "a batch that is copied", "a grid", "a grid that goes on", "packed ids", "ids that go on"],
)
def test_values_lost_before_the_step_are_told_at_the_cast(
    model: Callable[[], nn.Module], batch: Callable[[], Tensor], op: str, says: str, *, since: int, tmp_path: Path
) -> None:
    found = trained(model(), batch, tmp_path).primary
    assert isinstance(found, Incident)
    assert (found.cause, found.op, found.step, found.module) == (Cause.INFORMATION_LOST, op, since, "")
    assert found.source is not None
    assert found.source.file.endswith("test_casts_before.py")
    assert says in found.explanation


def pixels() -> Tensor:
    return (torch.randint(0, 256, (256, _WIDTH)) / 255).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (Encoded, lambda: torch.randint(0, 256, (256,)).to(torch.bfloat16)),
        (Encoded, lambda: torch.arange(250, dtype=torch.bfloat16)),
        (Encoded, pixels),
        (Unread, lambda: packed(16_400, 17_300).bfloat16()),
        (Encoded, lambda: (torch.randn(256, _WIDTH) * 3e3).round().bfloat16()),
        (LookedUp, lambda: packed(0, 2000).half()),
        (LookedUp, lambda: shifted_ids(1000)),
        (Encoded, mask_of_a_grid),
        (Encoded, lambda: counted_out().mean() + torch.randn(256)),
    ],
    ids=[
        *("few minutes", "a short grid", "pixels", "ids that nothing reads", "loud samples", "ids that float16 holds"),
        *("ids that go on", "a mask of a grid", "a mean of a grid"),
    ],
)
def test_their_harmless_twins_are_not(
    model: Callable[[], nn.Module], batch: Callable[[], Tensor], tmp_path: Path
) -> None:
    assert trained(model(), batch, tmp_path).verdict is Verdict.HEALTHY
