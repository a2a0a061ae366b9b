"""What a healthy run may train: small models on real digits, real text and noise, each with habits of its field."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BATCH, CLASSES, PIXELS, SIDE, TOKENS, LETTERS, WIDTH = 16, 10, 64, 8, 24, 128, 32
INFINITY = float("inf")

Loss = Callable[[nn.Module], Tensor]


@dataclass(slots=True)
class Task:
    """A model and where its losses come from."""

    model: nn.Module
    loss: Loss  #: of the next batch
    after_step: Callable[[], None] = lambda: None  #: what the loop keeps up to date by itself


@cache
def _digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


@cache
def _text() -> Tensor:
    letters = inspect.getsource(textwrap).encode("ascii", "replace")
    return torch.frombuffer(bytearray(letters), dtype=torch.uint8).long() % LETTERS


def _images() -> tuple[Tensor, Tensor]:
    images, labels = _digits()
    chosen = torch.randint(len(labels), (BATCH,))
    return images[chosen], labels[chosen]


def _lines() -> tuple[Tensor, Tensor]:
    text = _text()
    starts = torch.randint(len(text) - TOKENS - 1, (BATCH,))
    lines = torch.stack([text[start : start + TOKENS + 1] for start in starts.tolist()])
    return lines[:, :-1], lines[:, 1:]


def _classify(model: nn.Module) -> Tensor:
    images, labels = _images()
    return F.cross_entropy(model(images), labels, label_smoothing=0.1)


def perceptron() -> Task:
    layers = [nn.Linear(PIXELS, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, CLASSES)]
    return Task(nn.Sequential(*layers), _classify)


class _Convolutions(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(1, 8, 3, padding=1), norm(8)
        self.second, self.second_norm = nn.Conv2d(8, 8, 3, padding=1), norm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first_norm(self.first(x.view(-1, 1, SIDE, SIDE))))
        x = x + F.silu(self.second_norm(self.second(x)))
        out: Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return out


def convolutions() -> Task:
    return Task(_Convolutions(nn.BatchNorm2d), _classify)


def group_norms() -> Task:
    return Task(_Convolutions(lambda channels: nn.GroupNorm(2, channels)), _classify)


class _Attention(nn.Module):
    """A causal language model that spells its mask of -inf out."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(LETTERS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU("tanh"), nn.Linear(WIDTH, WIDTH))
        self.recomputes = recomputes
        self.register_buffer("mask", torch.full((TOKENS, TOKENS), -INFINITY).triu(1))

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        scores = query @ key.transpose(1, 2) / WIDTH**0.5
        return torch.softmax(scores + self.get_buffer("mask"), -1) @ value

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place.weight
        x = x + (checkpoint(self.attend, x, use_reentrant=False) if self.recomputes else self.attend(x))
        return F.linear(x + self.mlp(x), self.embed.weight)


def _next_letter(model: nn.Module) -> Tensor:
    lines, following = _lines()
    return F.cross_entropy(model(lines).flatten(0, 1), following.flatten())


def attention() -> Task:
    return Task(_Attention(recomputes=False), _next_letter)


def recomputed_attention() -> Task:
    return Task(_Attention(recomputes=True), _next_letter)


class _Padded(nn.Module):
    """torch's own encoder, some of whose tokens are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, WIDTH, padding_idx=0)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, ids: Tensor) -> Tensor:
        padding = torch.arange(TOKENS) >= torch.randint(4, TOKENS, (len(ids), 1))
        out: Tensor = self.head(self.encoder(self.embed(ids), src_key_padding_mask=padding))
        return out


def padded_encoder() -> Task:
    return Task(_Padded(), _next_letter)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cells = nn.Embedding(LETTERS, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, LETTERS)
        self.state: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        out, state = self.cells(self.embed(ids), self.state)
        self.state = state.detach()
        result: Tensor = self.head(out)
        return result


def carried_state() -> Task:
    """Truncated backpropagation: the hidden state goes from batch to batch."""
    return Task(_Recurrent(), _next_letter)


class _Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(PIXELS, WIDTH), nn.Linear(WIDTH // 2, PIXELS)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encode(x).float().chunk(2, -1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(-1).mean()
        return F.binary_cross_entropy_with_logits(self.decode(code), x) + 1e-3 * divergence


def variational() -> Task:
    return Task(_Variational(), lambda model: model(_images()[0]))


class _Experts(nn.Module):
    """Top-1 routing: an expert that gets no row has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(PIXELS, 4)
        self.experts = nn.ModuleList([nn.Linear(PIXELS, CLASSES) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).float().softmax(-1).max(-1)
        out = torch.zeros(len(x), CLASSES)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]).float() * weight[rows, None])
        return out


def experts() -> Task:
    return Task(_Experts(), _classify)


class _Adapter(nn.Module):
    """A frozen layer with a low-rank adapter that begins at zero, and a layer whose units are all dead."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(PIXELS, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(PIXELS, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        self.dead, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        nn.init.zeros_(self.up.weight)
        nn.init.constant_(self.dead.bias, -50.0)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.base(x) + 2 * self.up(self.down(x)))
        out: Tensor = self.head(hidden + F.relu(self.dead(hidden)))
        return out


def adapter() -> Task:
    return Task(_Adapter(), _classify)


def hinge() -> Task:
    """A margin that most rows keep to: zero loss, zero gradient, from early on."""

    def loss(model: nn.Module) -> Tensor:
        images, labels = _images()
        scores = model(images)
        return F.multi_margin_loss(scores.float(), labels, margin=0.05)

    return Task(nn.Linear(PIXELS, CLASSES), loss)


def tabular() -> Task:
    """Targets of several sizes, a loss that is robust to them, and a best value that begins at infinity."""
    model = nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.Softplus(), nn.Linear(WIDTH, 1))
    model.register_buffer("best", torch.tensor(INFINITY))

    def loss(model: nn.Module) -> Tensor:
        images, labels = _images()
        found = F.huber_loss(model(images).float().squeeze(-1), torch.log1p(100.0 * labels))
        model.get_buffer("best").copy_(torch.minimum(model.get_buffer("best"), found.detach()))
        return found

    return Task(model, loss)
