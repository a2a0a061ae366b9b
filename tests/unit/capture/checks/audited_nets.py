"""Small networks and trainings for audits, in which a cancellation may be planted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampscope.trace.schema import AuditOpRow, AuditRow, SiteRow, Table
from tests.support.training.twin_runs import Loop, Watched

WIDTH, CLASSES, ROWS = 32, 10, 16


class Shifted(nn.Module):
    """Adds a large constant and takes it away again, which leaves of its values what the dtype holds beside it."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.fc(x))
        return (x + self.shift) - self.shift if self.shift else x


class Twins(nn.Module):
    """The difference of two large and nearly equal activations, each of which was rounded by itself."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first.bias.data += offset
        self.second.bias.data += offset

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) - self.second(x)


class Net(nn.Module):
    """Blocks beside a residual connection, with what must be run again as it was: dropout, and statistics of a norm."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(self.drop(x))
        return out


def shifted(*shifts: float) -> Callable[[], nn.Module]:
    return lambda: Net([Shifted(shift) for shift in shifts])


def loop(
    make: Callable[[], nn.Module],
    dtype: torch.dtype = torch.bfloat16,
    *,
    steps: int = 6,
    micro_batches: int = 1,
    before: Callable[[Any, int], object] = lambda scope, step: None,
    spoil: Callable[[int, Tensor], Tensor] = lambda step, loss: loss,
) -> Loop:
    """A training of what ``make`` gives, in float16 with a scaler and in bfloat16 without.

    Args:
        make: Makes the model.
        dtype: Of autocast.
        steps: How many.
        micro_batches: In each.
        before: Called before each step with the scope, None where none watches, and the step.
        spoil: What becomes of the scaled loss of a step.
    """

    def train(watch: Callable[..., Any]) -> Any:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=dtype is torch.float16)
        scope = watch(model, scaler) if dtype is torch.float16 else watch(model)
        losses = []
        for step in range(steps):
            before(scope, step)
            optimizer.zero_grad()
            for _ in range(micro_batches):
                x, labels = torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,))
                with torch.autocast("cpu", dtype):
                    loss = F.cross_entropy(model(x).float(), labels) / micro_batches
                spoil(step, scaler.scale(loss)).backward()
                losses.append(loss.item())
            scaler.step(optimizer)
            scaler.update()
        return [model, optimizer, losses]

    return train


def audits(watched: Watched) -> list[AuditRow]:
    return watched.run.rows(Table.AUDITS)


def ops(watched: Watched, audit: AuditRow) -> list[tuple[SiteRow, AuditOpRow]]:
    """The rows of an audit, each with its program point."""
    sites = {row.site: row for row in watched.run.rows(Table.SITES)}
    rows = watched.run.rows(Table.AUDIT_OPS, step=audit.step, source=audit.source)
    return [(sites[row.site], row) for row in rows]
