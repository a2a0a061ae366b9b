"""Of several optimizers' gradients, a traced step counts those that it made: what others left is no measure of it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import ampscope
from ampscope.analysis.precision.plan import plan
from ampscope.analysis.scale.answer import scale_answer
from ampscope.report.precision_words import notes, sentences
from ampscope.trace.schema import Node, Table
from tests.support.training.small_loop import here

WIDTH, BATCH, STEPS = 8, 16, 10


def adversaries(folder: Path) -> None:
    """A generator and what judges it, which steps twice as often; each optimizer clears its own gradients alone."""
    torch.manual_seed(0)
    maker, judge = nn.Linear(WIDTH, WIDTH).to(here()), nn.Linear(WIDTH, 1).to(here())
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-3) for part in (judge, maker)]
    scaler = torch.amp.GradScaler(here(), init_scale=4096.0)
    with ampscope.watch([maker, judge], scaler, dir=folder, quiet=True):
        for _ in range(STEPS):
            for optimizer in (optimizers[0], *optimizers):
                with torch.autocast(here(), torch.float16):
                    made = maker(torch.randn(BATCH, WIDTH, device=here()))
                    made = made.detach() if optimizer is optimizers[0] else made
                    loss = judge(made).square().mean()
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()


def together(folder: Path) -> None:
    """Two optimizers that share each backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)).to(here())
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-3) for part in model]
    scaler = torch.amp.GradScaler(here(), init_scale=4096.0)
    with ampscope.watch(model, scaler, dir=folder, quiet=True):
        for _ in range(STEPS):
            with torch.autocast(here(), torch.float16):
                loss = model(torch.randn(BATCH, WIDTH, device=here())).square().mean()
            for each in optimizers:
                each.zero_grad()
            scaler.scale(loss).backward()
            for each in optimizers:
                scaler.step(each)
            scaler.update()


def counted(folder: Path) -> dict[str, set[str]]:
    """Whose gradients were counted, by the execution."""
    with ampscope.open_run(folder) as run:
        names = {site.site: site.name for site in run.rows(Table.SITES) if site.op == Node.GRADIENT}
        found: dict[str, set[str]] = {}
        for row in run.rows(Table.OPS):
            if row.site in names:
                found.setdefault(row.source, set()).add(names[row.site].partition(".")[0])
    return found


def test_gradients_that_another_optimizer_keeps_are_not_counted(run_folder: Path) -> None:
    adversaries(run_folder)
    assert counted(run_folder) == {"live": {"Linear[1]"}, "live@1": {"Linear[0]"}}
    with ampscope.open_run(run_folder) as run:
        answer, planned = scale_answer(run), plan(run)
    assert answer.window.low == planned.scale_window[0] == 1.0
    assert answer.window.exact
    assert not answer.window.unmeasured
    parts = ("optimizer 0 steps 2 parameters of Linear[1]", "optimizer 1 steps 2 parameters of Linear[0]")
    told = f"The run has 2 optimizers: {', '.join(parts)}."
    assert next(sentences(answer.window)) == f"{told} This is of optimizer 0."
    assert told in notes(planned)


def test_gradients_of_optimizers_that_share_a_backward_are_all_counted(run_folder: Path) -> None:
    together(run_folder)
    assert counted(run_folder) == {"live": {"0", "1"}}
