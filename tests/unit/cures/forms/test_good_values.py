"""What another form gives, compared with plain torch, and what is said of values that were good before."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ampscope.capture.changes.replaced_calls import OtherForm
from ampscope.capture.torch_support.user_line import Place
from ampscope.cures.call_form import ROUNDING, CallForm, CallPlace
from ampscope.cures.forms.bounds import AddedEps, DivisorBound, OperandBound
from ampscope.cures.forms.empty_rows import KeptRows, ZeroInfinity
from ampscope.cures.forms.exponentials import MaxOff
from ampscope.cures.forms.logarithms import CrossEntropy, FromLogits
from ampscope.cures.forms.means import MeanOfNothing
from ampscope.cures.forms.safe_where import SafeWhere
from ampscope.cures.forms.variance import Centred
from ampscope.trace.schema import Form

LOGS = frozenset({"log", "log2"})


class Replaced(NamedTuple):
    """What a program gave with a form in the place of its calls."""

    result: Tensor
    change: float | None  #: of good values; None where the form was not used


def replaced(form: CallForm, program: Callable[[Tensor], Tensor], x: Tensor) -> Replaced:
    """A program with all its calls at one line."""
    here = Place(replaced.__code__, 1)
    change = OtherForm(form, CallPlace(here.file, 1))
    with change.active(lambda: here):
        result = program(x)
    return Replaced(result, change.used.good_change if change.used is not None else None)


def from_logits(form: Form, made_by: str, calls: frozenset[str] = LOGS) -> FromLogits:
    """A form that begins where the program does."""
    return FromLogits(form, calls, made_by, CallPlace(Place(replaced.__code__, 1).file, 1))


def numbers() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1)) * 5


FOLLOWED: dict[str, tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "softmax": ("softmax", lambda x: x.softmax(-1).log(), lambda x: functional.log_softmax(x, -1)),
    "chosen": (
        "softmax",
        lambda x: torch.log(functional.softmax(x, dim=0).half().float()[1:, 2].unsqueeze(0).clamp(1e-9, 1.0) + 1e-9),
        lambda x: functional.log_softmax(x, 0)[1:, 2].unsqueeze(0),
    ),
    "of several": (
        "softmax",
        lambda x: torch.softmax(x, 1)[:, :3].sum(1, keepdim=True).log2(),
        lambda x: functional.log_softmax(x, 1)[:, :3].logsumexp(1, keepdim=True) / math.log(2),
    ),
    "sigmoid": ("sigmoid", lambda x: x.sigmoid().log(), functional.logsigmoid),
    "rest": ("sigmoid", lambda x: torch.log(1.0 - torch.sigmoid(x)), lambda x: functional.logsigmoid(-x)),
    "product": (
        "sigmoid",
        lambda x: (torch.sigmoid(x) * torch.rsub(torch.sigmoid(x), 1)).log(),
        lambda x: functional.logsigmoid(x) + functional.logsigmoid(-x),
    ),
    "sum": ("exp", lambda x: x.exp().sum(-1).log(), lambda x: x.logsumexp(-1)),
    "mean": ("exp", lambda x: x.exp().mean().log(), lambda x: x.flatten().logsumexp(0) - math.log(24)),
    "share": ("exp", lambda x: (x.exp() / x.exp().sum(1, True)).log(), lambda x: x - x.logsumexp(1, True)),
}


@pytest.mark.parametrize(("made_by", "program", "by_hand"), FOLLOWED.values(), ids=FOLLOWED.keys())
def test_a_logarithm_from_the_logits(
    made_by: str, program: Callable[[Tensor], Tensor], by_hand: Callable[[Tensor], Tensor]
) -> None:
    x = numbers()
    result, change = replaced(from_logits(Form.LOG_SOFTMAX, made_by), program, x)
    torch.testing.assert_close(result, by_hand(x), rtol=1e-6, atol=1e-6)
    assert change is not None
    assert change <= ROUNDING


def test_gradients_take_the_other_way_too() -> None:
    x = (300 * numbers()).requires_grad_()
    result, _ = replaced(from_logits(Form.LOG_SOFTMAX, "softmax"), lambda x: x.softmax(-1).log(), x)
    (gradient,) = torch.autograd.grad(result[:, 0].sum(), x)
    (by_hand,) = torch.autograd.grad(functional.log_softmax(x, -1)[:, 0].sum(), x)
    torch.testing.assert_close(gradient, by_hand)
    assert gradient.isfinite().all()


UNKNOWN: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "scaled": ("softmax", lambda x: (x.softmax(-1) * 0.5).log()),
    "another one": ("softmax", lambda x: x.sigmoid().log()),
    "written into": ("sigmoid", lambda x: x.sigmoid().mul_(2.0).log()),
    "one minus a softmax": ("softmax", lambda x: (1 - x.softmax(-1)).log()),
    "two minus it": ("sigmoid", lambda x: (2 - x.sigmoid()).log()),
    "one more": ("sigmoid", lambda x: (1 + x.sigmoid()).log()),
    "far from its bounds": ("sigmoid", lambda x: x.sigmoid().clamp(0.3, 0.6).log()),
}


@pytest.mark.parametrize(("made_by", "program"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_what_is_not_a_known_logarithm_stays(made_by: str, program: Callable[[Tensor], Tensor]) -> None:
    x = numbers()
    result, change = replaced(from_logits(Form.LOGSIGMOID, made_by), program, x)
    assert torch.equal(result, program(x))
    assert change is None


def test_half_precision_is_measured_by_what_the_code_means() -> None:
    x = numbers().half().abs()
    form = from_logits(Form.LOGSIGMOID, "sigmoid")
    result, change = replaced(form, lambda x: torch.log(1 - torch.sigmoid(x)), x)
    torch.testing.assert_close(result, functional.logsigmoid(-x))
    far = (torch.log(1 - torch.sigmoid(x)) - result).abs()
    assert far[far.isfinite()].max() > 0.01, "the call as written was rounded by more than that"
    assert change is not None
    assert change <= ROUNDING


def test_an_eps_that_matters_is_a_change_of_good_values() -> None:
    form = from_logits(Form.LOG_SOFTMAX, "softmax")
    _, change = replaced(form, lambda x: (x.softmax(-1) + 1e-3).log(), numbers())
    assert change is not None
    assert change > ROUNDING


def test_binary_cross_entropy_from_the_logits() -> None:
    x, target = numbers(), torch.rand(4, 6, generator=torch.Generator().manual_seed(2))
    form = from_logits(Form.WITH_LOGITS, "sigmoid", frozenset({"binary_cross_entropy"}))
    result, change = replaced(form, lambda x: functional.binary_cross_entropy(x.sigmoid(), target, reduction="none"), x)
    torch.testing.assert_close(result, functional.binary_cross_entropy_with_logits(x, target, reduction="none"))
    assert change is not None
    assert change <= ROUNDING


def test_a_cross_entropy_of_the_logits() -> None:
    x, target = numbers(), torch.tensor([0, 2, 5, 1])
    weight = torch.rand(6, generator=torch.Generator().manual_seed(2))
    form = CrossEntropy(CallPlace(Place(replaced.__code__, 1).file, 1))

    def program(x: Tensor) -> Tensor:
        return functional.nll_loss(torch.log(x.softmax(1) + 1e-12), target, weight=weight, ignore_index=2)

    result, change = replaced(form, program, x)
    torch.testing.assert_close(result, functional.cross_entropy(x, target, weight, ignore_index=2))
    assert change is not None
    assert change <= ROUNDING


VARIANCES: dict[str, Callable[[Tensor], Tensor]] = {
    "methods": lambda x: x.pow(2).mean(-1) - x.mean(-1).pow(2),
    "operators": lambda x: (x * x).mean(dim=-1) - x.mean(dim=-1) ** 2,
    "functions": lambda x: torch.mean(torch.square(x), -1) - torch.square(torch.mean(x, -1)),
}


@pytest.mark.parametrize("program", VARIANCES.values(), ids=VARIANCES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_variance_by_centred_squares(program: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = numbers().to(dtype)
    result, change = replaced(Centred(frozenset({CallPlace(Place(replaced.__code__, 1).file, 1)})), program, x)
    centred = (x - x.mean(-1, keepdim=True)).square().mean(-1)
    assert torch.equal(result, centred)
    exact = x.double().var(-1, unbiased=False)
    torch.testing.assert_close(result.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=0)
    assert change is not None
    assert change <= ROUNDING


def test_a_variance_along_several_dimensions_and_of_all() -> None:
    x = numbers().view(2, 2, 6)
    at = frozenset({CallPlace(Place(replaced.__code__, 1).file, 1)})
    along, _ = replaced(Centred(at), lambda x: (x**2).mean([0, 2], True) - x.mean(dim=[0, 2], keepdim=True) ** 2, x)
    torch.testing.assert_close(along, x.var((0, 2), unbiased=False, keepdim=True))
    whole, _ = replaced(Centred(at), lambda x: (x**2).mean() - x.mean() ** 2, x)
    torch.testing.assert_close(whole, x.var(unbiased=False))


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.pow(2).mean(0) - x.mean(-1).mean().pow(2),
        lambda x: x.pow(2).mean(-1) - (x + 1).mean(-1).pow(2),
        lambda x: x.mean(-1).pow(2) - x.pow(2).mean(-1),
        lambda x: x.pow(3).mean(-1) - x.mean(-1).pow(3),
        lambda x: x.square().mul_(2).mean(-1) - x.mean(-1).square(),
    ],
)
def test_what_is_no_variance_stays(program: Callable[[Tensor], Tensor]) -> None:
    form = Centred(frozenset({CallPlace(Place(replaced.__code__, 1).file, 1)}))
    result, change = replaced(form, program, numbers())
    assert torch.equal(result, program(numbers()))
    assert change is None


def test_the_maximum_taken_off() -> None:
    def by_hand(x: Tensor) -> Tensor:
        e = torch.exp(x)
        return e / e.sum(-1, keepdim=True)

    x = 30 * numbers()
    result, change = replaced(MaxOff((-1,)), by_hand, x)
    torch.testing.assert_close(result, x.softmax(-1))
    assert not by_hand(x).isfinite().all()
    assert change is not None
    assert change <= ROUNDING
    _, change = replaced(MaxOff((-1,)), lambda x: torch.exp(x) / (torch.exp(x) + 1), numbers())
    assert change is not None
    assert change > ROUNDING, "what is not divided by its sum does not stay the same"


BY_HAND: dict[str, tuple[CallForm, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "bound from below": (OperandBound(LOGS, 0, 1e-3, lowest=True), torch.log, lambda x: x.clamp(min=1e-3).log()),
    "bound from above": (
        OperandBound(frozenset({"exp"}), 0, 3.0, lowest=False),
        torch.exp,
        lambda x: x.clamp(max=3.0).exp(),
    ),
    "divisor": (
        DivisorBound(frozenset({"div"}), 1, 0.5, lowest=True),
        lambda x: x / x.abs(),
        lambda x: x / x.abs().clamp(min=0.5),
    ),
    "of a number": (
        DivisorBound(frozenset({"div"}), 1, 0.5, lowest=True),
        lambda x: 2 / x.abs(),
        lambda x: 2 / x.abs().clamp(min=0.5),
    ),
    "added": (
        AddedEps(frozenset({"sqrt"}), argument=0, value=0.5),
        lambda x: x.abs().sqrt(),
        lambda x: (x.abs() + 0.5).sqrt(),
    ),
}


@pytest.mark.parametrize(("form", "program", "by_hand"), BY_HAND.values(), ids=BY_HAND.keys())
def test_a_bound_is_the_one_that_is_told(
    form: CallForm, program: Callable[[Tensor], Tensor], by_hand: Callable[[Tensor], Tensor]
) -> None:
    x = numbers()
    result, change = replaced(form, program, x)
    assert torch.equal(result, by_hand(x))
    good = program(x).isfinite()
    apart = (by_hand(x).double() - program(x).double()).abs() / program(x).double().abs()
    assert change == pytest.approx(float(apart[good].max()) / torch.finfo(x.dtype).eps)
    assert change is not None
    assert change > ROUNDING or torch.equal(by_hand(x)[good], program(x)[good])


def test_a_root_without_a_slope_at_zero() -> None:
    x = torch.tensor([0.0, 4.0, 9.0], requires_grad=True)
    result, change = replaced(SafeWhere(frozenset({"sqrt"}), keeps=True), torch.sqrt, x)
    assert result.tolist() == [0.0, 2.0, 3.0]
    assert torch.autograd.grad(result.sum(), x)[0].tolist() == [0.0, 0.25, pytest.approx(1 / 6)]
    assert change == 0.0


def test_a_divisor_made_safe() -> None:
    x = torch.tensor([0.0, 4.0, -2.0], requires_grad=True)
    result, change = replaced(SafeWhere(frozenset({"div"}), keeps=False), lambda x: 8 / x, x)
    assert result.tolist() == [8.0, 2.0, -4.0]
    assert torch.autograd.grad(result.sum(), x)[0].tolist() == [0.0, -0.5, -2.0]
    assert change == 0.0


def masked() -> Tensor:
    x = numbers()
    x[1] = -math.inf
    x[2, :3] = -math.inf
    return x


@pytest.mark.parametrize("softmax", [torch.softmax, functional.softmax, Tensor.softmax, functional.log_softmax])
def test_rows_without_a_key_are_zero(softmax: Callable[..., Tensor]) -> None:
    x = masked()
    result, change = replaced(KeptRows(), lambda x: softmax(x, dim=-1), x)
    plain = softmax(x, dim=-1)
    assert not result[1].any()
    assert torch.equal(result[[0, 2, 3]], plain[[0, 2, 3]])
    assert change == 0.0


@pytest.mark.parametrize("additive", [False, True])
def test_so_they_are_in_attention(additive: bool) -> None:
    q = numbers()[None]
    allowed = torch.ones(4, 4, dtype=torch.bool).tril(-1)
    mask = torch.zeros(4, 4).masked_fill(~allowed, -math.inf) if additive else allowed
    result, change = replaced(KeptRows(), lambda q: functional.scaled_dot_product_attention(q, q, q, mask), q)
    weights = (q @ q.mT / math.sqrt(6)).masked_fill(~allowed, -math.inf).softmax(-1)
    torch.testing.assert_close(result[0, 1:], (weights @ q)[0, 1:])
    assert not result[0, 0].any()
    assert change is not None
    assert change == 0.0 or not additive


def test_so_they_are_in_multi_head_attention() -> None:
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(6, 2, batch_first=True)
    padding = torch.tensor([[False, False, True], [True, True, True]])
    x = torch.randn(2, 3, 6)
    result, change = replaced(KeptRows(), lambda x: attention(x, x, x, key_padding_mask=padding)[0], x)
    torch.testing.assert_close(result[0], attention(x, x, x, key_padding_mask=padding)[0][0])
    assert not result[1].any()
    assert change == 0.0


def test_a_target_without_an_alignment_is_left_out() -> None:
    given = functional.log_softmax(numbers(), -1)[:, None].repeat(1, 2, 1)
    targets, lengths = (
        torch.tensor([[1, 1, 2, 2, 3, 3], [1, 2, 0, 0, 0, 0]]),
        (torch.tensor([4, 4]), torch.tensor([6, 2])),
    )
    form = ZeroInfinity()
    result, change = replaced(form, lambda x: functional.ctc_loss(x, targets, *lengths, 0, "none", False), given)
    plain = functional.ctc_loss(given, targets, *lengths, reduction="none")
    assert plain[0] == math.inf
    assert result.tolist() == [0.0, float(plain[1])]
    assert change == 0.0


WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 0.0])
MEANS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "some targets": (
        lambda x: functional.cross_entropy(x, torch.tensor([1, -100, 2, 3])),
        lambda x: functional.cross_entropy(x[[0, 2, 3]], torch.tensor([1, 2, 3])),
    ),
    "weighted": (
        lambda x: functional.cross_entropy(x, torch.tensor([1, 7, 2, 5]), WEIGHTS, ignore_index=7),
        lambda x: functional.cross_entropy(x[[0, 2, 3]], torch.tensor([1, 2, 5]), WEIGHTS),
    ),
    "no target": (lambda x: functional.cross_entropy(x, torch.full((4,), -100)), lambda x: torch.tensor(0.0)),
    "no weight": (lambda x: functional.nll_loss(x, torch.full((4,), 5), WEIGHTS), lambda x: torch.tensor(0.0)),
    "no element": (lambda x: functional.mse_loss(x[x > 1e9], x[x > 1e9]), lambda x: torch.tensor(0.0)),
}


@pytest.mark.parametrize(("program", "by_hand"), MEANS.values(), ids=MEANS.keys())
def test_a_mean_of_nothing_is_zero(program: Callable[[Tensor], Tensor], by_hand: Callable[[Tensor], Tensor]) -> None:
    x = numbers()
    result, change = replaced(MeanOfNothing(), program, x)
    torch.testing.assert_close(result.abs(), by_hand(x))
    assert change is not None
    assert change <= ROUNDING
