"""Healthy trainings of unusual numbers: other dtypes, what is sparse or complex, losses that jump, scales that fall."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.integration.healthy_runs.loops import Precision, Training, _perceptron
from tests.integration.healthy_runs.tasks import BATCH, CLASSES, LETTERS, PIXELS, WIDTH, _classify, _images, _lines


def _usual(
    model: nn.Module,
    precision: Precision,
    loss_of: Callable[[int], Tensor],
    optimizer: torch.optim.Optimizer,
    *others: torch.optim.Optimizer,
) -> Training:
    """The usual loop around what is unusual."""

    def step(number: int) -> Tensor:
        for each in (optimizer, *others):
            each.zero_grad()
        with precision.autocast():
            loss = loss_of(number)
        precision.backward(loss)
        precision.step(optimizer, *others)
        return loss.detach()

    return Training(model, step, precision.scaler)


def pure_bfloat16(_: random.Random) -> Training:
    """Weights, activations and the optimizer's state in bfloat16, at a rate whose updates it can hold."""
    model = nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))
    model.bfloat16()

    def loss_of(_: int) -> Tensor:
        images, labels = _images()
        return F.cross_entropy(model(images.bfloat16()).float(), labels)

    return _usual(model, Precision(None), loss_of, torch.optim.AdamW(model.parameters(), lr=1e-2))


def double(chance: random.Random) -> Training:
    """All in float64."""
    model = _perceptron().double()

    def loss_of(_: int) -> Tensor:
        images, labels = _images()
        return F.cross_entropy(model(images.double()), labels)

    optimizer = chance.choice((torch.optim.Adam, torch.optim.SGD))(model.parameters(), lr=1e-3)
    return _usual(model, Precision(None), loss_of, optimizer)


class _Spectral(nn.Module):
    """A filter of complex weights between two Fourier transforms, and the phase of what it lets through."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(PIXELS // 2 + 1, dtype=torch.complex64) / 8)
        self.head = nn.Linear(PIXELS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        through = torch.fft.rfft(x.float(), norm="ortho") * self.filter
        energy = torch.view_as_real(through).square().sum((-1, -2))
        out: Tensor = self.head(torch.fft.irfft(through, n=PIXELS, norm="ortho")) + 1e-3 * energy[:, None]
        return out


def spectral(chance: random.Random) -> Training:
    precision, model = Precision.drawn(chance, scaled=False), _Spectral()  # GradScaler does not take complex gradients
    return _usual(model, precision, lambda _: _classify(model), torch.optim.Adam(model.parameters(), lr=2e-3))


def sparse(chance: random.Random) -> Training:
    """Letters with sparse gradients and an optimizer of their own beside that of the dense weights."""
    precision = Precision.drawn(chance, scaled=False)
    embed, head = nn.Embedding(LETTERS, WIDTH, sparse=True), nn.Linear(WIDTH, LETTERS)
    model = nn.Sequential(embed, head)

    def loss_of(_: int) -> Tensor:
        lines, following = _lines()
        return F.cross_entropy(model(lines).flatten(0, 1), following.flatten())

    dense = torch.optim.Adam(head.parameters(), lr=2e-3)
    return _usual(model, precision, loss_of, torch.optim.SparseAdam(embed.parameters(), lr=2e-3), dense)


class _Experts(nn.Module):
    """Two of four experts for each row, one of which the router never chooses, and a loss that balances the others."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.norm = nn.Linear(PIXELS, 4), nn.LayerNorm(PIXELS)
        self.experts = nn.ModuleList([nn.Linear(PIXELS, CLASSES) for _ in range(4)])
        nn.init.constant_(self.router.bias, 0.0)
        self.register_buffer("closed", torch.tensor([0.0, 0.0, 0.0, -torch.inf]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chances = (self.router(self.norm(x)).float() + self.get_buffer("closed")).softmax(-1)
        weights, chosen = chances.topk(2, -1)
        outs = torch.stack([expert(x).float() for expert in self.experts], 1)
        picked = outs.gather(1, chosen[..., None].expand(-1, -1, CLASSES))
        return (picked * weights[..., None]).sum(1), (chances.mean(0) ** 2).sum()


def idle_expert(chance: random.Random) -> Training:
    precision, model = Precision.drawn(chance), _Experts()

    def loss_of(_: int) -> Tensor:
        images, labels = _images()
        scores, balance = model(images)
        return F.cross_entropy(scores, labels) + 0.01 * balance

    return _usual(model, precision, loss_of, torch.optim.AdamW(model.parameters(), lr=2e-3))


def queue(chance: random.Random) -> Training:
    """MoCo: keys of an encoder that follows, in a queue that the loop turns."""
    precision, model = Precision.drawn(chance), _perceptron()
    keys, held, place = copy.deepcopy(model).requires_grad_(False), torch.randn(4 * BATCH, CLASSES), [0]

    def loss_of(_: int) -> Tensor:
        images, _labels = _images()
        ours = F.normalize(model(images).float(), dim=-1)
        with torch.no_grad():
            for follower, weight in zip(keys.parameters(), model.parameters(), strict=True):
                follower.lerp_(weight, 0.1)
            theirs = F.normalize(keys(images + 0.05 * torch.randn_like(images)).float(), dim=-1)
        logits = torch.cat([(ours * theirs).sum(-1, keepdim=True), ours @ held.clone().T], -1) / 0.2
        held[place[0] : place[0] + BATCH] = theirs
        place[0] = (place[0] + BATCH) % len(held)
        return F.cross_entropy(logits, torch.zeros(BATCH, dtype=torch.long))

    return _usual(model, precision, loss_of, torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9))


class _Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(LETTERS, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, ids: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        out, state = self.cell(self.embed(ids), state)
        return self.head(out), state


def handed_on(chance: random.Random) -> Training:
    """Truncated backpropagation whose loop hands the state from step to step, and clears it now and then."""
    precision, model = Precision.drawn(chance), _Cell()
    state: list[Tensor | None] = [None]

    def loss_of(number: int) -> Tensor:
        lines, following = _lines()
        scores, hidden = model(lines, None if number % 8 == 7 else state[0])
        state[0] = hidden.detach()
        return F.cross_entropy(scores.flatten(0, 1), following.flatten())

    return _usual(model, precision, loss_of, torch.optim.Adam(model.parameters(), lr=2e-3))


def frozen_half(chance: random.Random) -> Training:
    """A frozen base in half precision under low-rank adapters in float32, that begin at zero."""
    precision = Precision.drawn(chance)
    base = nn.Linear(PIXELS, WIDTH).to(precision.dtype or torch.float32).requires_grad_(False)
    down, up, head = nn.Linear(PIXELS, 4, bias=False), nn.Linear(4, WIDTH, bias=False), nn.Linear(WIDTH, CLASSES)
    nn.init.zeros_(up.weight)
    model = nn.ModuleDict({"base": base, "down": down, "up": up, "head": head})
    weights = [weight for weight in model.parameters() if weight.requires_grad]

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = base(x.to(base.weight.dtype)).float() + 2 * up(down(x))
            out: Tensor = head(F.relu(hidden))
            return out

    adapted = Adapted()
    return _usual(adapted, precision, lambda _: _classify(adapted), torch.optim.AdamW(weights, lr=2e-3))


def resting(chance: random.Random) -> Training:
    """A rate of exactly zero for some steps, then raised all at once, tenfold later, and back."""
    precision, model = Precision.drawn(chance), _perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)

    def loss_of(number: int) -> Tensor:
        optimizer.param_groups[0]["lr"] = 0.0 if number < 5 else 0.03 if 20 <= number < 25 else 0.003
        return _classify(model)

    return _usual(model, precision, loss_of, optimizer)


def recomputed(chance: random.Random) -> Training:
    """Blocks that backward runs once more, with dropout that comes out the same, in either way of checkpointing."""
    precision, reentrant = Precision.drawn(chance), chance.random() < 0.5
    blocks = nn.ModuleList(
        [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
    )

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.blocks, self.head = nn.Linear(PIXELS, WIDTH), blocks, nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=reentrant)
            out: Tensor = self.head(x)
            return out

    model = Blocks()
    return _usual(model, precision, lambda _: _classify(model), torch.optim.AdamW(model.parameters(), lr=1e-3))


def values(chance: random.Random) -> Training:
    """Values learnt from a memory of what happened, against a target that is copied over now and then."""
    precision, model = Precision.drawn(chance), _perceptron()
    target = copy.deepcopy(model).requires_grad_(False)

    def loss_of(number: int) -> Tensor:
        images, labels = _images()
        if number % 7 == 6:
            target.load_state_dict(model.state_dict())
        action = torch.randint(CLASSES, (BATCH,))
        # Rewards of a few large prizes: most batches have none, and some have several.
        reward = (action == labels).float() * torch.exp(2 * torch.randn(BATCH))
        with torch.no_grad():
            wanted = reward + 0.9 * target(_images()[0]).float().max(-1).values
        told = model(images).float().gather(1, action[:, None])[:, 0]
        return F.smooth_l1_loss(told, wanted)

    return _usual(model, precision, loss_of, torch.optim.Adam(model.parameters(), lr=1e-3))


def curriculum(chance: random.Random) -> Training:
    """Targets that grow a hundredfold in the middle of the run, and stay so; larger batches later."""
    precision = Precision.drawn(chance)
    model = nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def loss_of(number: int) -> Tensor:
        draws = [_images() for _ in range(1 if number < 35 else 3)]
        images, labels = torch.cat([each[0] for each in draws]), torch.cat([each[1] for each in draws])
        wanted = labels.float() * (100.0 if number >= 25 else 1.0) / CLASSES
        return F.mse_loss(model(images).float().squeeze(-1), wanted)

    return _usual(model, precision, loss_of, torch.optim.Adam(model.parameters(), lr=2e-3))


def high_scale(chance: random.Random) -> Training:
    """A scaler that begins at 2^24 and has to come down, or one that grows often and probes its limit."""
    probes = chance.random() < 0.5
    scaler = torch.amp.GradScaler("cpu", growth_interval=6) if probes else torch.amp.GradScaler("cpu", init_scale=2**24)
    model = _perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return _usual(model, Precision(torch.float16, scaler), lambda _: _classify(model), optimizer)


class _Gated(nn.Module):
    """Units that are open or shut: what decides it leaves float16, and is bounded, as it is in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.score = nn.Linear(PIXELS, WIDTH), nn.Linear(PIXELS, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        steep = self.score(x).detach() * 6e4
        out: Tensor = self.last(F.relu(self.first(x)) * steep.clamp(0.0, 1.0))
        return out


def gates(_: random.Random) -> Training:
    """Overflows that a bound takes to where any large number would come."""
    model = _Gated()
    optimizer = torch.optim.Adam([*model.first.parameters(), *model.last.parameters()], lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    return _usual(model, Precision(torch.float16, scaler), lambda _: _classify(model), optimizer)
