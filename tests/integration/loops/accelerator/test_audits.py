"""A healthy step on an accelerator is audited there, and says what the same step says on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ampscope.trace.schema import AuditStatus, Table
from tests.support.training.accelerator import fake_device
from tests.support.training.twin_runs import train_both
from tests.unit.capture.checks.audited_nets import CLASSES, ROWS, WIDTH, audits, ops, shifted

pytestmark = pytest.mark.accelerator


def train(
    watch: Callable[..., Any],
    *,
    device: str = fake_device.TYPE,
    dtype: torch.dtype = torch.float16,
    fused: bool = False,
    asked_at: int | None = None,
    steps: int = 4,
) -> list[Any]:
    """The same numbers on every device; without dropout, of which each has its own."""
    model = shifted(30.0, 0.0)()
    model.drop = torch.nn.Identity()
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaled = dtype is torch.float16
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, enabled=scaled)
    scope = watch(model, scaler) if scaled else watch(model)
    losses = []
    for step in range(steps):
        x, labels = torch.randn(ROWS, WIDTH).to(device), torch.randint(0, CLASSES, (ROWS,)).to(device)
        if step == asked_at and scope is not None:
            scope.audit()
        optimizer.zero_grad()
        with torch.autocast(torch.device(device).type, dtype):
            loss = F.cross_entropy(model(x).float(), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return [model, optimizer, losses]


@pytest.mark.parametrize("latency", [0, fake_device.NEVER], ids=["at once", "later"])
@pytest.mark.parametrize("device", ["fake", "fake:1"])
@pytest.mark.parametrize(
    ("dtype", "fused"), [(torch.float16, False), (torch.float16, True), (torch.bfloat16, False)], ids=str
)
def test_every_second_step_changes_no_bit(
    device: str, dtype: torch.dtype, fused: bool, latency: int, run_folder: Path
) -> None:
    with fake_device.latency(latency):
        watched = train_both(partial(train, device=device, dtype=dtype, fused=fused), run_folder, audit_every=2)
    assert [(row.step, row.status, row.reason) for row in audits(watched)] == [
        (1, AuditStatus.DONE, ""),
        (3, AuditStatus.DONE, ""),
    ]
    assert watched.warnings == []
    assert watched.incidents == []


def test_it_says_what_it_says_on_the_host(run_folder: Path) -> None:
    there, here = (
        train_both(partial(train, device=device, asked_at=1), run_folder / device) for device in ("fake", "cpu")
    )
    of_device, of_host = audits(there)[0], audits(here)[0]
    assert (of_device.step, of_device.status) == (of_host.step, of_host.status) == (1, AuditStatus.DONE)
    assert of_device.loss is not None
    assert of_device.loss == pytest.approx(of_host.loss, rel=1e-3)
    assert of_device.reference_loss == pytest.approx(of_host.reference_loss, rel=1e-5)
    assert of_device.explained == pytest.approx(of_device.loss - (of_device.reference_loss or 0.0), rel=0.5)
    add, sub = (
        next(
            row
            for site, row in ops(there, of_device)
            if (site.op, site.module, site.phase) == (op, "blocks.0", "forward")
        )
        for op in ("aten.add.Tensor", "aten.sub.Tensor")
    )
    assert 0 < (add.local or 0.0) < torch.finfo(torch.float16).eps / 2
    assert sub.local == 0.0, "it takes away what add has added, exactly"
    assert (sub.inherited or 0.0) > (add.local or 0.0)


def test_its_ops_are_those_of_its_trace(run_folder: Path) -> None:
    watched = train_both(partial(train, asked_at=2), run_folder)
    (row,) = audits(watched)
    traced = {(op.seq, op.out): op.site for op in watched.run.rows(Table.OPS, step=2, source=row.source)}
    found = {(op.seq, op.out): op.site for _, op in ops(watched, row)}
    assert found
    assert found.items() <= traced.items()
    assert any(op.local for _, op in ops(watched, row))
