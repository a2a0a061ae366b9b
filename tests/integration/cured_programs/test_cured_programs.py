"""Programs that fail, with what a diagnosis changes of their lines: trained again they are healthy to their end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.cured_programs.programs import HEAD, diagnosed, trained
from tests.support.command import Command

pytestmark = pytest.mark.filterwarnings("ignore:std.*degrees of freedom:UserWarning")  # of one value

RATE = """
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
ampscope.watch(model, scaler, dir=RUN)
for step in range(12):
    x = torch.randn(16, 8) * 2
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
SQUARES = """
class Norm(nn.Module):
    def forward(self, x):
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


model = nn.Sequential(nn.Linear(8, 8, bias=False), Norm(), nn.Linear(8, 1))
nn.init.eye_(model[0].weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
ampscope.watch(model, scaler, dir=RUN, every=1)
for step in range(4):
    x = torch.randn(4, 8)
    x[0, 0] = 900.0 if step == 2 else 1.0
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(x).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
PRODUCT = """
class Scores(nn.Module):
    def forward(self, q, k):
        scores = q @ k.transpose(-2, -1)
        return (scores / 64).softmax(-1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.scores = nn.Linear(64, 64), nn.Linear(64, 64), Scores()

    def forward(self, x):
        return self.scores(self.q(x), self.k(x))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
ampscope.watch(model, scaler, dir=RUN)
for step in range(12):
    x = torch.randn(2, 8, 64) * (1.0 if step < 2 else 120.0)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(x).square().float().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
VARIANCE = """
class Scaled(nn.Module):
    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True) - x.mean(-1, keepdim=True).pow(2)
        return x * torch.rsqrt(variance + 1e-3)


model = nn.Sequential(nn.Linear(8, 8, bias=False), Scaled(), nn.Linear(8, 1))
nn.init.eye_(model[0].weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
ampscope.watch(model, scaler, dir=RUN, every=1)
for step in range(4):
    x = torch.randn(4, 8) * 4 + (300.0 if step == 2 else 0.0)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(x).float().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
LIKELIHOOD = """
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
ampscope.watch(model, scaler, dir=RUN, every=1)
for step in range(4):
    x, target = torch.randn(16, 8) * (400.0 if step == 2 else 1.0), torch.arange(16) % 4
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        logits = model(x)
        p = torch.softmax(logits, dim=1)
        loss = F.nll_loss(torch.log(p), target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
TOGETHER = """
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
ampscope.watch(model, dir=RUN, every=1)
for step in range(4):
    x = torch.randn(16, 8)
    x[0] = 0.0 if step == 2 else 1.0
    optimizer.zero_grad()
    size = (model(x) - model.bias).abs()
    loss = size.log().mean()
    loss = loss + size.sqrt().mean()
    loss.backward()
    optimizer.step()
"""
ANGLE = """
class Angle(nn.Module):
    def forward(self, x):
        a, b = F.normalize(x.float(), dim=-1), F.normalize(x.float().roll(1, 0), dim=-1)
        cosine = (a * b).sum(-1)
        return torch.acos(cosine)


model = nn.Sequential(nn.Linear(8, 8, bias=False), Angle())
nn.init.eye_(model[0].weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
ampscope.watch(model, scaler, dir=RUN)
for step in range(4):
    x = torch.ones(4, 8) if step == 2 else torch.randn(4, 8)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(x).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
DEVIATION = """
class Standard(nn.Module):
    def forward(self, x):
        return (x - x.mean(0)) / (x.std(0) + 1e-3)


model = nn.Sequential(nn.Linear(8, 8), Standard(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
ampscope.watch(model, dir=RUN)
for step in range(4):
    optimizer.zero_grad()
    loss = (model(torch.randn(1 if step == 2 else 4, 8)) - 1).square().mean()
    loss.backward()
    optimizer.step()
"""
SUMS = """
def dice(p, t):
    t = t.to(p.dtype)
    inter = torch.sum(p * t)
    union = torch.sum(p) + torch.sum(t)
    return 1.0 - (2.0 * inter + 1e-3) / (union + 1e-3)


model = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Sigmoid())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
ampscope.watch(model, scaler, dir=RUN, replay_budget=1)
for step in range(4):
    x = torch.randn(1, 1, *(2 * [448 if step == 2 else 64]))
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = dice(model(x), (x > -2.0).float())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
SMOOTHED = """
class Masked(nn.Module):
    def forward(self, x):
        return x.masked_fill(torch.arange(4) == 3, float("-inf"))


model = nn.Sequential(nn.Linear(8, 4), Masked())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
ampscope.watch(model, scaler, dir=RUN)
for step in range(4):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(torch.randn(6, 8)), torch.arange(6) % 3, label_smoothing=0.1)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
HALF = """
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(dtype=torch.float16)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
ampscope.watch(model, scaler, dir=RUN)
for step in range(6):
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = F.mse_loss(model(x).float(), x.sum(1, keepdim=True))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""
DIRECTION = """
class Unit(nn.Module):
    def forward(self, x):
        return x / x.float().norm(dim=-1, keepdim=True)


model = nn.Sequential(nn.Linear(8, 16, bias=False), Unit(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
ampscope.watch(model, scaler, dir=RUN)
for step in range(4):
    x = torch.randn(16, 8)
    x[0] *= step != 2
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = F.mse_loss(model(x).float(), x.sum(1, keepdim=True))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
CURED = [
    ("operand_bound", DIRECTION),
    ("operand_bound", ANGLE),
    ("operand_bound", DEVIATION),
    ("safe_where", TOGETHER),
    ("smaller_step", RATE),
    ("clipped", RATE),
    ("in_float32", SQUARES),
    ("in_float32", SUMS),
    ("constant", SMOOTHED),
    ("scale_first", PRODUCT),
    ("centred", VARIANCE),
    ("cross_entropy", LIKELIHOOD),
    ("usage", HALF),
]


@pytest.mark.parametrize(("kind", "program"), CURED)
def test_a_program_is_healthy_with_its_remedy(
    ampscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, program: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(HEAD + program)
    trained("before")
    said = diagnosed(ampscope, "before")
    assert said["verdict"] == "problem"
    remedies = said["primary"]["remedies"]
    number = next(at for at, each in enumerate(remedies, 1) if each["kind"] == kind and each["diff"])
    assert "loss scale" not in remedies[number - 1]["text"]
    assert ampscope("fix", "before", "--apply", "--remedy", number).code == 0
    trained("after")
    assert diagnosed(ampscope, "after")["verdict"] == "healthy"
