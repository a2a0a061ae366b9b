"""Gradients that are zero in mathematics hold rounding alone, which is no difference between two runs.

The bias of a key shifts all logits of a row alike, and that of a convolution before a norm is subtracted again:
whatever is rounded in another way gives them other gradients, as large as before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ampscope
from ampscope.analysis.replay.compare.compare_results import DifferenceKind, Likeness
from ampscope.analysis.replay.compare.comparison import compare

WIDTH, LENGTH, BATCH, CLASSES = 32, 12, 8, 5


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A training; each field is what one planted change is about."""

    gelu: str = "none"
    norm_eps: float = 1e-5
    float_probabilities: bool = False
    divisor: float = 4.0
    bias: float = 0.0  #: added to that of the query


class Model(nn.Module):
    """Attention whose key has a bias of its own, and a convolution with one before a norm."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm1d(WIDTH, eps=plan.norm_eps)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.query(x) @ self.key(x).transpose(-1, -2) / self.plan.divisor
        x = x + self.out(logits.softmax(-1) @ self.value(x))
        x = x + functional.gelu(self.norm(self.conv(x.transpose(1, 2))), approximate=self.plan.gelu).transpose(1, 2)
        return self.head(x)


def train(folder: Path, plan: Plan) -> Path:
    torch.manual_seed(0)
    model = Model(plan)
    with torch.no_grad():
        model.query.bias.add_(plan.bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with ampscope.watch(model, dir=folder, every=1, quiet=True, overhead=1.0):
        for _ in range(2):
            x, targets = torch.randn(BATCH, LENGTH, WIDTH), torch.randint(CLASSES, (BATCH, LENGTH, 1))
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(x)
                probabilities = (logits.float() if plan.float_probabilities else logits).softmax(-1)
                loss = -probabilities.gather(-1, targets).log().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return folder


Trained = Callable[[Plan], Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trains by a plan, each once."""
    known: dict[Plan, Path] = {}
    folder = tmp_path_factory.mktemp("zeros")

    def of(plan: Plan) -> Path:
        return known[plan] if plan in known else known.setdefault(plan, train(folder / f"run-{len(known)}", plan))

    return of


@pytest.mark.parametrize(
    ("changed", "kind", "text"),
    [
        (Plan(gelu="tanh"), DifferenceKind.SCALAR, "approximate of gelu"),
        (Plan(norm_eps=1e-4), DifferenceKind.SCALAR, "eps of native_batch_norm"),
        (
            Plan(float_probabilities=True),
            DifferenceKind.CAST,
            "B alone has a cast that the code asks for from bfloat16",
        ),
    ],
    ids=["another gelu", "another eps", "a softmax in float32"],
)
def test_what_was_changed_is_told_and_no_gradient_of_zero(
    trained: Trained, changed: Plan, kind: DifferenceKind, text: str
) -> None:
    found = compare(trained(Plan()), trained(changed))
    assert (found.likeness, found.first_divergence) == (Likeness.WITHIN_TOLERANCE, None)
    assert found.differences[0].kind is kind
    assert text in found.differences[0].text


@pytest.mark.parametrize(
    ("changed", "op", "module"),
    [(Plan(divisor=4.2), "aten.div.Tensor", ""), (Plan(bias=0.02), "parameter", "query")],
    ids=["another divisor", "another bias"],
)
def test_what_is_no_rounding_parts_the_runs_where_it_was_changed(
    trained: Trained, changed: Plan, op: str, module: str
) -> None:
    found = compare(trained(Plan()), trained(changed))
    assert found.likeness is Likeness.DIFFERENT
    assert found.first_divergence is not None
    assert (found.first_divergence.op, found.first_divergence.module) == (op, module)
