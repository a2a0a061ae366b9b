"""Right training loops as a user would write them: the text that `operators` changes.

A loop is given ``SEED``, ``SCALE`` (the scaler's first), ``AMP`` and ``HALF`` (whether autocast is on, and its dtype),
``STEPS`` (the iterations, over which its one ``for`` at module level goes) and ``watch``.
"""

from __future__ import annotations

_HEAD = """\
import copy
import torch
from torch import nn
from torch.nn import functional as F
"""
_DIGITS = """\
from sklearn.datasets import load_digits

torch.manual_seed(SEED)
digits, target = load_digits(return_X_y=True)
digits = torch.tensor(digits).to(torch.get_default_dtype()) / 16
target = torch.tensor(target)
"""

_MLP = """\
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=AMP and HALF == torch.float16)
watch(model, scaler)
for step in STEPS:
    rows = slice(step * 28 % 1700, step * 28 % 1700 + 28)
    x, y = digits[rows].clone(), target[rows]
    x = (x - x.mean()) / (x.std() + 1e-6)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=HALF, enabled=AMP):
        logits = model(x)
        losses = F.cross_entropy(logits, y, reduction="none")
        keep = (y != 9).to(losses.dtype)
        loss = (losses * keep).sum() / keep.sum().clamp(min=1.0)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""

_GPT = """\
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 16)
    def forward(self, tokens):
        h = self.embed(tokens)
        mean = h.mean(-1, keepdim=True)
        h = (h - mean) / torch.sqrt((h - mean).pow(2).mean(-1, keepdim=True) + 1e-5)
        q, k, v = self.qkv(h).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 32**0.5
        future = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
        h = h + scores.softmax(-1) @ v
        return self.out(h)

torch.manual_seed(SEED)
model = Block()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=AMP and HALF == torch.float16)
watch(model, scaler)
for step in STEPS:
    start = torch.randint(16, (8, 1))
    tokens = (start + 3 * torch.arange(13)) % 16
    with torch.autocast("cpu", dtype=HALF, enabled=AMP):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""

_CONV = """\
model = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8, eps=1e-5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)
)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-8)
scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=AMP and HALF == torch.float16)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
average = copy.deepcopy(model)
watch(model, scaler)
for step in STEPS:
    rows = slice(step * 24 % 1700, step * 24 % 1700 + 24)
    x, y = digits[rows].reshape(-1, 1, 8, 8).clone(), target[rows]
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=HALF, enabled=AMP):
        p = model(x).softmax(-1)
        right = p.gather(1, y[:, None])
        loss = -torch.log(right.clamp(min=1e-6)).mean() + 0.01 * (p * torch.log(p + 1e-6)).sum(-1).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    with torch.no_grad():
        for slow, fast in zip(average.parameters(), model.parameters()):
            slow.lerp_(fast, 0.1)
"""

_TEACHER = """\
teacher = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10)).requires_grad_(False)
model = nn.Sequential(nn.Linear(64, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=AMP and HALF == torch.float16)
watch(model, scaler)
for step in STEPS:
    x = digits[torch.randint(len(digits), (32,))]
    x = x / x.norm(dim=1, keepdim=True).clamp(min=1e-6)
    with torch.autocast("cpu", dtype=HALF, enabled=AMP):
        with torch.no_grad():
            wanted = (teacher(x) / 0.5).softmax(-1)
        given = (model(x) / 0.5).softmax(-1)
        kl = (wanted * (torch.log(wanted + 1e-5) - torch.log(given + 1e-5))).sum(-1)
        loss = kl.mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
"""

_ACCUMULATE = """\
model = nn.Sequential(nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=AMP and HALF == torch.float16)
watch(model, scaler)
for step in STEPS:
    optimizer.zero_grad()
    for micro in range(2):
        picked = torch.randint(len(digits), (12,))
        x, y = digits[picked], target[picked]
        with torch.autocast("cpu", dtype=HALF, enabled=AMP):
            logits = model(x)
            shifted = logits - logits.amax(-1, keepdim=True)
            logp = shifted - torch.log(torch.exp(shifted).sum(-1, keepdim=True))
            loss = -logp.gather(1, y[:, None]).mean() / 2
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""

_GAN = """\
maker = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())
critic = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
makes = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.99))
judges = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=AMP and HALF == torch.float16)
watch([maker, critic], scaler)
for step in STEPS:
    x = digits[torch.randint(len(digits), (16,))]
    noise = torch.randn(16, 8)
    judges.zero_grad()
    with torch.autocast("cpu", dtype=HALF, enabled=AMP):
        fake = maker(noise)
        doubt = F.softplus(-critic(x)).mean() + F.softplus(critic(fake.detach())).mean()
    scaler.scale(doubt).backward()
    scaler.step(judges)
    makes.zero_grad()
    with torch.autocast("cpu", dtype=HALF, enabled=AMP):
        praise = F.softplus(-critic(fake)).mean()
    scaler.scale(praise).backward()
    scaler.step(makes)
    scaler.update()
"""

_CONTRAST = """\
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
watch(model)
for step in STEPS:
    x = digits[torch.randint(len(digits), (24,))]
    near = x + 0.05 * torch.randn_like(x)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=AMP):
        a, b = model(x), model(near)
        a = a / torch.sqrt((a * a).sum(-1, keepdim=True) + 1e-6)
        b = b / torch.sqrt((b * b).sum(-1, keepdim=True) + 1e-6)
        gap = torch.sqrt((a - b).pow(2).sum(-1) + 1e-6).mean()
        loss = F.cross_entropy(a @ b.T / 0.2, torch.arange(24)) + 0.1 * gap
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""

HOSTS = {
    "mlp": _HEAD + _DIGITS + _MLP,
    "gpt": _HEAD + _GPT,
    "conv": _HEAD + _DIGITS + _CONV,
    "teacher": _HEAD + _DIGITS + _TEACHER,
    "accumulate": _HEAD + _DIGITS + _ACCUMULATE,
    "gan": _HEAD + _DIGITS + _GAN,
    "contrast": _HEAD + _DIGITS + _CONTRAST,
}
#: Hosts without a scaler, in which the dtype is written.
BF16_ALONE = frozenset({"contrast"})
#: Iterations of each.
STEPS = 40
