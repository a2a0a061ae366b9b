"""Forms for what no precision helps: which is tried for a program, that it cures it, and what it leaves as it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ampscope
from ampscope.cures.call_form import ROUNDING
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import Change, Form, ReplayRow, Table, Trial
from ampscope.trace.vocabulary import TOGETHER

#: What torch says itself of a deviation of one value.
pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")

#: A program: what becomes of the output of a layer, 4 x 8.
Program = Callable[[Tensor], Tensor]

TARGETS = torch.tensor([0, 1, 2, 3])
ONES = torch.ones(4, 8)
EMPTY_ROW = torch.zeros(4, 8, dtype=torch.bool)
EMPTY_ROW[1] = True


class Programmed(nn.Module):
    """A layer and a program after it."""

    def __init__(self, program: Program, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8).to(dtype)
        self.program = program

    def forward(self, x: Tensor) -> Tensor:
        return self.program(self.layer(x))


def forms_tried(run: Path, model: nn.Module, *, step: Callable[[nn.Module], Tensor] | None = None) -> list[ReplayRow]:
    """One step of a model; the forms that were tried on it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dtype = next(model.parameters()).dtype
    with ampscope.watch(model, dir=run, quiet=True):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3)).to(dtype)
        loss = step(model) if step is not None else model(x).float().mean()
        loss.backward()
        optimizer.step()
    return [row for row in open_run(run).rows(Table.REPLAYS) if row.change == Change.FORM]


def first(run: Path, program: Program, dtype: torch.dtype = torch.float32) -> ReplayRow:
    """The first form that was tried on a program."""
    torch.manual_seed(0)
    return forms_tried(run, Programmed(program, dtype))[0]


def zeros_in(x: Tensor) -> Tensor:
    """Numbers from 0 on, some of them exactly 0."""
    return x.square() * (x > 0)


def soft_by_hand(h: Tensor) -> Tensor:
    e = (200 * h).exp()
    return e / e.sum(-1, keepdim=True)


def underflowing_soft(h: Tensor) -> Tensor:
    e = (h - 200).exp()
    return (e / e.sum(-1, keepdim=True)).square()


def log_of_sum(h: Tensor) -> Tensor:
    return torch.log(torch.exp(300 * h).sum(-1) + 1e-9)


def log_of_hand_softmax(h: Tensor) -> Tensor:
    e = torch.exp(300 * h)
    p = e / e.sum(dim=-1, keepdim=True)
    return p.log()


def both_sides(h: Tensor) -> Tensor:
    p = torch.sigmoid(90 * h.abs() + 20)
    return -(ONES * torch.log(p) + (2 - ONES) * torch.log(1.0 - p))


def of_chosen(h: Tensor) -> Tensor:
    p = torch.sigmoid(h.abs() + 90)
    return torch.where(ONES > 0, 1 - p, p).clamp(0.0, 1.0).log()


def masked_mean(h: Tensor) -> Tensor:
    count = torch.relu(h).round().sum(-1) * 0
    return torch.where(count > 0, h.sum(-1) / count, torch.zeros(()))


def attention(h: Tensor) -> Tensor:
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    weights = (h @ h.T).masked_fill(~mask, -math.inf).softmax(dim=-1)
    return weights @ h


def angle(h: Tensor) -> Tensor:
    cosine = torch.tanh(h)
    return torch.acos(cosine + (1 - cosine.detach()) * (h > 0))


def area(h: Tensor) -> Tensor:
    return torch.arctanh((torch.tanh(h) * 4).clamp(-1, 1))


def no_alignment(h: Tensor) -> Tensor:
    probabilities = functional.log_softmax(h, -1).unsqueeze(1)
    lengths = torch.tensor([4]), torch.tensor([6])
    return functional.ctc_loss(probabilities, torch.tensor([[1, 1, 2, 2, 3, 3]]), *lengths)


def deviation(h: Tensor) -> Tensor:
    x = 3e3 + 0.1 * h
    return (x.pow(2).mean(-1) - x.mean(-1).pow(2)).sqrt()


def scaled_by_hand(h: Tensor) -> Tensor:
    x = 3e3 + 0.1 * h
    mean = torch.mean(x, dim=-1, keepdim=True)
    variance = torch.mean(x * x, dim=-1, keepdim=True) - mean**2
    return h * torch.rsqrt(variance + 1e-9)


#: By what is tried first: the form, the call in whose place it stands, and the programs.
EXACT: list[tuple[str, Form, str, Program]] = [
    ("log of softmax", Form.LOG_SOFTMAX, "log", lambda h: torch.log((300 * h).softmax(-1))),
    ("of what was chosen", Form.LOG_SOFTMAX, "log", lambda h: (300 * h).softmax(-1).gather(1, TARGETS[:, None]).log()),
    ("indexed", Form.LOG_SOFTMAX, "log", lambda h: torch.log((300 * h).softmax(dim=1)[torch.arange(4), TARGETS - 4])),
    ("base two", Form.LOG_SOFTMAX, "log2", lambda h: torch.log2(torch.softmax(300 * h, -1))),
    ("by hand", Form.LOG_SOFTMAX, "log", log_of_hand_softmax),
    (
        "likelihood",
        Form.CROSS_ENTROPY,
        "nll_loss",
        lambda h: functional.nll_loss(torch.log((300 * h).softmax(1)), TARGETS),
    ),
    (
        "likelihood of each",
        Form.CROSS_ENTROPY,
        "nll_loss",
        lambda h: functional.nll_loss((300 * h).softmax(-1).log(), TARGETS, ignore_index=1, reduction="none"),
    ),
    ("variance", Form.CENTRED, "sub", deviation),
    ("variance of a norm", Form.CENTRED, "sub", scaled_by_hand),
    ("log of sigmoid", Form.LOGSIGMOID, "log", lambda h: torch.sigmoid(h - 120).log()),
    ("of one minus it", Form.LOGSIGMOID, "log", lambda h: torch.log(1 - torch.sigmoid(h + 30))),
    ("of both", Form.LOGSIGMOID, "log", both_sides),
    ("of either", Form.LOGSIGMOID, "log", of_chosen),
    ("log of a sum", Form.LOGSUMEXP, "log", log_of_sum),
    ("log of an empty sum", Form.LOGSUMEXP, "log", lambda h: torch.log((h - 200).exp().sum(-1))),
    ("softmax by hand", Form.MAX_OFF, "exp", soft_by_hand),
    ("of nothing but zeros", Form.MAX_OFF, "exp", underflowing_soft),
    ("masked quotient", Form.SAFE_WHERE, "div", masked_mean),
    ("masked logarithm", Form.SAFE_WHERE, "log", lambda h: torch.where(h > 0, zeros_in(h).log(), torch.zeros(()))),
    ("root at zero", Form.SAFE_WHERE, "sqrt", lambda h: zeros_in(h).sqrt()),
    ("power at zero", Form.SAFE_WHERE, "pow", lambda h: zeros_in(h) ** 0.7),
    ("empty row", Form.KEPT_ROWS, "softmax", attention),
    ("no alignment", Form.ZERO_INFINITY, "ctc_loss", no_alignment),
    ("mean of nothing", Form.OPERAND_BOUND, "mean", lambda h: h[h > 99].mean()),
    ("no target", Form.OPERAND_BOUND, "cross_entropy", lambda h: functional.cross_entropy(h, TARGETS * 0 - 100)),
    ("divisor", Form.OPERAND_BOUND, "div", lambda h: zeros_in(h) / zeros_in(h)),
    ("reciprocal", Form.OPERAND_BOUND, "div", lambda h: 1.0 / zeros_in(h)),
    ("divisor of both signs", Form.SAFE_WHERE, "div", lambda h: h / (h * (h.detach().abs() > 0.3))),
    ("slope at one", Form.OPERAND_BOUND, "acos", angle),
    ("infinite at one", Form.OPERAND_BOUND, "arctanh", area),
    ("beyond one by rounding", Form.OPERAND_BOUND, "asin", lambda h: (h.sign() * (1 + 2e-7)).asin() * h),
    ("deviation of one", Form.OPERAND_BOUND, "std", lambda h: torch.stack([x.std(0).mean() for x in (h, h[:1])])),
    ("variance of one", Form.OPERAND_BOUND, "var", lambda h: torch.var(h[:, :1], dim=(1,)) * h[:, 0]),
    ("negative root", Form.OPERAND_BOUND, "sqrt", lambda h: h.sqrt()),
    ("negative power", Form.OPERAND_BOUND, "pow", lambda h: h.pow(1.5)),
    ("logarithm", Form.OPERAND_BOUND, "log", lambda h: zeros_in(h).log()),
    ("exponential", Form.OPERAND_BOUND, "exp", lambda h: 1e-30 * torch.exp(400 * h)),
    ("exponential and its product", Form.OPERAND_BOUND, "exp", lambda h: torch.exp(400 * h) * (1e3 + h)),
    ("exponential and its sum", Form.OPERAND_BOUND, "exp", lambda h: 1e-9 * (5.0 * torch.exp(400 * h)).sum(-1)),
]


@pytest.mark.parametrize(("form", "call", "program"), [each[1:] for each in EXACT], ids=[each[0] for each in EXACT])
def test_the_first_form_cures_and_leaves_good_values(run_folder: Path, form: Form, call: str, program: Program) -> None:
    row = first(run_folder, program)
    assert (row.form, row.form_call, row.outcome) == (form, call, Trial.FINITE)
    assert row.form_file is not None
    assert row.form_file.endswith("test_mathematics.py")
    assert row.good_change is None or row.good_change <= ROUNDING


@pytest.mark.parametrize(
    ("bounded", "beside"),
    [(lambda s: s, None), (lambda s: s + 1e-3, 1e-3), (lambda s: s.clamp(min=1e-4), 1e-4), (lambda s: 0.001 * s, None)],
    ids=["alone", "an eps", "a bound", "a factor"],
)
def test_what_stands_beside_a_sum_is_told(
    run_folder: Path, bounded: Callable[[Tensor], Tensor], beside: float | None
) -> None:
    row = first(run_folder, lambda h: (e := (200 * h).exp()) / bounded(e.sum(-1, keepdim=True)))
    assert (row.form, row.form_was) == (Form.MAX_OFF, beside)


#: What looks like one of them and is not: the program, and the form that must not be tried.
OTHERWISE: list[tuple[str, Form, Program]] = [
    ("a logarithm of no softmax", Form.LOG_SOFTMAX, lambda h: zeros_in(h).log()),
    ("of a softmax times zero", Form.LOG_SOFTMAX, lambda h: ((300 * h).softmax(-1) * zeros_in(h)).log()),
    ("an exponential that nothing divides", Form.MAX_OFF, lambda h: 1e-30 * torch.exp(400 * h)),
    ("a sum that divides another", Form.MAX_OFF, lambda h: h / (torch.exp(300 * h).sum(-1, keepdim=True) - torch.inf)),
    ("a divisor that nothing masks", Form.SAFE_WHERE, lambda h: zeros_in(h) / zeros_in(h)),
    ("a softmax of infinities", Form.KEPT_ROWS, lambda h: (h * 1e38 * 1e38).softmax(-1)),
    (
        "a likelihood over another dimension",
        Form.CROSS_ENTROPY,
        lambda h: functional.nll_loss((300 * h).softmax(0).log(), TARGETS),
    ),
    ("a difference of no variance", Form.CENTRED, lambda h: (h.square().mean(-1) - h.mean(-1).pow(2) - 1e9).sqrt()),
    ("of two", Form.CENTRED, lambda h: (h.square().mean(-1) - (h + 9).mean(-1).pow(2)).sqrt()),
    ("far beyond one", Form.OPERAND_BOUND, lambda h: (2 + h.abs()).acos()),
    ("a deviation of nothing", Form.OPERAND_BOUND, lambda h: h[h > 99].std()),
    ("a mean of something", Form.OPERAND_BOUND, lambda h: (h * 1e38 * 1e38).mean()),
]


@pytest.mark.parametrize(("form", "program"), [each[1:] for each in OTHERWISE], ids=[each[0] for each in OTHERWISE])
def test_a_form_is_not_tried_where_it_does_not_apply(run_folder: Path, form: Form, program: Program) -> None:
    torch.manual_seed(0)
    tried = forms_tried(run_folder, Programmed(program))
    assert form not in [row.form for row in tried]


HEALTHY: list[Program] = [
    lambda h: torch.log(h.softmax(-1)),
    lambda h: torch.where(h > 0, h, torch.zeros(())) / h.abs().clamp(min=1e-3),
    lambda h: h.abs().add(1e-3).sqrt(),
    lambda h: h.exp() / h.exp().sum(-1, keepdim=True),
]


@pytest.mark.parametrize("program", HEALTHY)
def test_nothing_is_tried_on_a_good_step(run_folder: Path, program: Program) -> None:
    assert forms_tried(run_folder, Programmed(program)) == []


def root_of(x: Tensor) -> Tensor:
    return zeros_in(x).sqrt()


def log_beside(x: Tensor) -> Tensor:
    return zeros_in(x).log()


def test_two_calls_that_fail_by_themselves_are_tried_together(run_folder: Path) -> None:
    torch.manual_seed(0)
    rows = forms_tried(run_folder, Programmed(lambda h: log_beside(h) + (h * 2).reciprocal() * 0 + root_of(h)))
    assert [(row.form, row.form_call, row.outcome, row.reason) for row in rows] == [
        (Form.OPERAND_BOUND, "log", Trial.NONFINITE, ""),
        (Form.SAFE_WHERE, "sqrt", Trial.FINITE, TOGETHER),
    ]


def test_a_call_that_fails_still_is_left_to_other_forms(run_folder: Path) -> None:
    torch.manual_seed(0)
    rows = forms_tried(run_folder, Programmed(lambda h: h.pow(-1.5) * 1e30 * 1e30))
    assert not [row for row in rows if row.reason == TOGETHER and row.form_call == "pow"]
