"""Loops that misuse scaler or autocast, with the change that a diagnosis makes of them: run again they are healthy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.cured_programs.programs import HEAD, diagnosed, trained
from tests.support.command import Command

SETUP = """
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
ampscope.watch(model, scaler, dir=RUN)
data = [torch.randn(16, 8) for _ in range(8)]


def loss_of(x):
    return F.mse_loss(model(x).float(), x.sum(1, keepdim=True))


"""
FORWARD = """for i, x in enumerate(data):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = loss_of(x)
"""
LOOPS = {
    "clipped before it is unscaled": f"""{FORWARD}
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
""",
    "clipped in a branch": f"""{FORWARD}
    scaler.scale(loss).backward()
    if i >= 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
""",
    "a decision on scaled gradients": f"""{FORWARD}
    scaler.scale(loss).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    if norm < 1e6:
        scaler.step(optimizer)
    scaler.update()
""",
    "stepped past the scaler": f"""{FORWARD}
    scaler.scale(loss).backward()
    optimizer.step()
""",
    "a loss that is not scaled": f"""{FORWARD}
    scaler.scale(loss).backward()
    extra = sum(p.square().sum() for p in model.parameters())
    extra.backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "nothing is scaled": f"""{FORWARD}
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "nothing is scaled before it is unscaled": f"""{FORWARD}
    loss.backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
""",
    "backward under autocast": """for x in data:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = loss_of(x)
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "autocast around the loop": """with torch.autocast("cpu", torch.float16):
    for x in data:
        optimizer.zero_grad()
        loss = loss_of(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    "update missing": f"""{FORWARD}
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
""",
    "unscaled twice": f"""{FORWARD}
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
""",
    "cleared before the step": f"""{FORWARD}
    scaler.scale(loss).backward()
    optimizer.zero_grad()
    scaler.step(optimizer)
    scaler.update()
""",
    "set to zero before the step": f"""{FORWARD}
    scaler.scale(loss).backward()
    optimizer.zero_grad(set_to_none=False)
    scaler.step(optimizer)
    scaler.update()
""",
    "cleared before gradients are clipped": f"""{FORWARD}
    scaler.scale(loss).backward()
    model.zero_grad()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
""",
    "each micro-batch": """for i, x in enumerate(data):
    with torch.autocast("cpu", torch.float16):
        loss = loss_of(x)
    scaler.scale(loss).backward()
    if i % 2:
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()
""",
}
PROGRAMS = {name: SETUP + loop for name, loop in LOOPS.items()}
PROGRAMS["a scaler for each step"] = f"""{SETUP}
for epoch in range(3):
    for x in data:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""".replace('scaler = torch.amp.GradScaler("cpu", init_scale=64.0)\n', "").replace("model, scaler,", "model,")
PROGRAMS["no scaler"] = f"""{SETUP}{FORWARD}
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
""".replace('scaler = torch.amp.GradScaler("cpu", init_scale=64.0)\n', "").replace("model, scaler,", "model,")


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_loop_is_healthy_once_it_is_mended(
    ampscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(HEAD + program)
    trained("before")
    assert diagnosed(ampscope, "before")["primary"]["remedies"][0]["kind"] == "usage"
    assert ampscope("fix", "before", "--apply").code == 0
    trained("after")
    assert diagnosed(ampscope, "after")["verdict"] == "healthy"
