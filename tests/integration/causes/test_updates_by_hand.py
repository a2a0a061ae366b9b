"""A weight that the loop's own update makes inf or NaN of finite gradients: told in that step, at the op."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import ampscope
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.trace.vocabulary import Cause, Verdict

STEPS, BAD = 9, 6

Parameters = dict[str, nn.Parameter]
#: Moves the weights; is given the step, and what it keeps from step to step.
Update = Callable[[Parameters, dict[str, Tensor]], None]


class Gated(nn.Module):
    """A branch that may be shut, and gets gradients of exactly zero then."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 8)
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, open_gate: bool) -> Tensor:
        return self.head(torch.tanh(self.body(x)) + float(open_gate) * torch.sigmoid(self.gate(x)))


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def half_denominator(weights: Parameters, kept: dict[str, Tensor]) -> None:
    """RMSprop with squares in float16, whose eps float16 does not hold."""
    for name, p in weights.items():
        square = kept[name] = ((gradient(p) * 1e2).half() ** 2).mul_(0.1)
        p.sub_(1e-3 * (gradient(p) / (square.sqrt() + 1e-8)))


def wide_denominator(weights: Parameters, kept: dict[str, Tensor]) -> None:
    for name, p in weights.items():
        square = kept[name] = (gradient(p) ** 2).mul_(0.1)
        p.sub_(1e-3 * (gradient(p) / (square.sqrt() + 1e-8)))


def in_place_moment(weights: Parameters, kept: dict[str, Tensor]) -> None:
    """A moment that the loop writes in place before it divides by it."""
    for name, p in weights.items():
        moment = kept.setdefault(name, torch.zeros_like(p))
        moment.zero_().addcmul_(gradient(p), gradient(p), value=0.1)
        p.data.copy_(p.data - 1e-3 * gradient(p) / moment.sqrt())


def trust_ratio(weights: Parameters, _: dict[str, Tensor]) -> None:
    """LARS, all updates first and then all weights at once."""
    grads = [gradient(p) for p in weights.values()]
    ratios = [g * (1e-2 * (p.norm() / g.norm())) for p, g in zip(weights.values(), grads, strict=True)]
    torch._foreach_sub_(list(weights.values()), ratios)


def guarded_ratio(weights: Parameters, _: dict[str, Tensor]) -> None:
    for p in weights.values():
        ratio = p.norm() / gradient(p).norm()
        p.sub_(gradient(p) * 1e-2 * torch.where(gradient(p).norm() > 0, ratio, 1.0))


def mended(weights: Parameters, _: dict[str, Tensor]) -> None:
    for p in weights.values():
        p.add_(torch.nan_to_num(gradient(p) / gradient(p).norm()), alpha=-1e-2)


# -- updates whose first weights stay as they should, and a later one does not --------------------------------------


def gate_last(weights: Parameters) -> list[tuple[str, nn.Parameter]]:
    """The weights whose gradients may be zero come last: the step is judged before the first of all is written."""
    return sorted(weights.items(), key=lambda each: each[0].startswith("gate"))


def in_the_write(weights: Parameters, kept: dict[str, Tensor], eps: float = 0.0) -> None:
    """Adam without a second average: what divides is the write itself."""
    for name, p in gate_last(weights):
        moment = kept.setdefault(name, torch.zeros_like(p)).mul_(0.5).add_(gradient(p), alpha=0.5)
        p.addcdiv_(moment, (gradient(p) ** 2).sqrt() + eps, value=-1e-3)


def in_the_write_with_eps(weights: Parameters, kept: dict[str, Tensor]) -> None:
    in_the_write(weights, kept, 1e-8)


def one_after_the_other(weights: Parameters, _: dict[str, Tensor]) -> None:
    for _name, p in gate_last(weights):
        p.data -= gradient(p) / gradient(p).norm() * 1e-2


def written_over(weights: Parameters, _: dict[str, Tensor]) -> None:
    for _name, p in gate_last(weights):
        p.data = p.data - gradient(p) / gradient(p).norm() * 1e-2
        gradient(p).zero_()


def all_before_the_first(weights: Parameters, _: dict[str, Tensor]) -> None:
    slopes = {name: gradient(p) / gradient(p).norm() for name, p in gate_last(weights)}
    for name, slope in slopes.items():
        weights[name].sub_(slope, alpha=1e-2)


def into_itself(weights: Parameters, _: dict[str, Tensor]) -> None:
    """Weights are moved, and moved again by what is zero for one of them."""
    for name, p in gate_last(weights):
        p.sub_(1e-2 * gradient(p))
        p.div_(gradient(p).sign().abs().max() if name == "gate.bias" else 1.0)


def metric_alone(weights: Parameters, kept: dict[str, Tensor]) -> None:
    """What is divided by nothing is looked at, and no weight gets it."""
    for name, p in gate_last(weights):
        kept[name] = gradient(p).norm() / (gradient(p) * 2).norm()
        p.sub_(1e-2 * gradient(p))


def repaired(weights: Parameters, _: dict[str, Tensor]) -> None:
    for _name, p in gate_last(weights):
        before = p.clone()
        p.sub_(gradient(p) / gradient(p).norm() * 1e-2)
        p.copy_(torch.where(p.isfinite(), p, before))


def trained(update: Update, folder: Path) -> Diagnosis:
    torch.manual_seed(0)
    model = Gated()
    kept: dict[str, Tensor] = {}
    with ampscope.watch(model, dir=folder, quiet=True):
        for step in range(STEPS):
            x = torch.randn(8, 6)
            with torch.autocast("cpu", torch.bfloat16):
                loss = (model(x, step != BAD).float() - x.sum(1, keepdim=True)).square().mean()
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                update(dict(model.named_parameters()), kept)
    return ampscope.diagnose(folder)


def told(diagnosis: Diagnosis) -> tuple[Cause, int, str, str, str]:
    primary = diagnosis.primary
    assert isinstance(primary, Incident), diagnosis.summary
    assert primary.source is not None
    return primary.cause, primary.step, primary.phase, primary.module, primary.source.function


@pytest.mark.parametrize(
    ("update", "cause"),
    [
        (half_denominator, Cause.EPS_UNDERFLOW),
        (in_place_moment, Cause.DIV_ZERO),
        (trust_ratio, Cause.DIV_ZERO),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_an_update_that_divides_by_zero_is_told_in_the_step_that_moves_the_weights(
    update: Update, cause: Cause, run_folder: Path
) -> None:
    diagnosis = trained(update, run_folder)
    assert told(diagnosis)[:3] == (cause, BAD, "optimizer")
    assert told(diagnosis)[4] in (update.__name__, f"{update.__name__}.<locals>.<listcomp>")


@pytest.mark.parametrize(
    "update",
    [in_the_write, one_after_the_other, written_over, all_before_the_first, into_itself],
    ids=lambda each: each.__name__,
)
def test_a_weight_that_is_written_later_is_told_in_the_same_step_at_its_op(update: Update, run_folder: Path) -> None:
    diagnosis = trained(update, run_folder)
    assert told(diagnosis)[:4] == (Cause.DIV_ZERO, BAD, "optimizer", "gate")
    assert update.__name__ in told(diagnosis)[4]
    later = [each for each in diagnosis.incidents if each.cause is Cause.BAD_WEIGHT]
    assert {each.written_by.step for each in later if each.written_by is not None} <= {BAD}


def test_later_steps_that_find_the_weight_bad_name_who_wrote_it(run_folder: Path) -> None:
    diagnosis = trained(trust_ratio, run_folder)
    later = [each for each in diagnosis.incidents if each.cause is Cause.BAD_WEIGHT]
    assert later
    assert {each.written_by.step for each in later if each.written_by is not None} == {BAD}


@pytest.mark.parametrize(
    "update",
    [wide_denominator, guarded_ratio, mended, in_the_write_with_eps, metric_alone, repaired],
    ids=lambda each: each.__name__,
)
def test_an_update_that_is_guarded_is_healthy(update: Update, run_folder: Path) -> None:
    diagnosis = trained(update, run_folder)
    assert diagnosis.verdict is Verdict.HEALTHY, diagnosis.summary


def climbed(folder: Path, *, eps: float) -> Diagnosis:
    """Sharpness-aware minimisation by hand, the ascent within a step of an optimizer."""
    torch.manual_seed(0)
    model = Gated()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with ampscope.watch(model, dir=folder, quiet=True):
        for step in range(STEPS):
            x = torch.randn(8, 6)
            for is_first in (True, False):
                optimizer.zero_grad()
                margin = model(x, True) * (0.0 if step == BAD else 1.0)
                (1 - margin + (step == BAD) * -2.0).clamp(min=0).mean().backward()
                if is_first:
                    with torch.no_grad():
                        norm = torch.stack([gradient(p).norm() for p in model.parameters()]).norm()
                        ascents = [gradient(p) * (0.05 / (norm + eps)) for p in model.parameters()]
                        for p, ascent in zip(model.parameters(), ascents, strict=True):
                            p.add_(ascent)
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), ascents)
            optimizer.step()
    return ampscope.diagnose(folder)


def test_an_ascent_divided_by_the_norm_of_no_gradient_is_told_before_the_second_forward(run_folder: Path) -> None:
    assert told(climbed(run_folder, eps=0.0))[:4] == (Cause.DIV_ZERO, BAD, "optimizer", "")


def test_an_ascent_whose_norm_is_kept_from_zero_is_healthy(run_folder: Path) -> None:
    assert climbed(run_folder, eps=1e-12).verdict is Verdict.HEALTHY


def private(folder: Path, *, dtype: torch.dtype) -> Diagnosis:
    """Gradients of single samples by torch.func, each divided by its norm; from one step on a sample counts nothing."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).to(dtype)

    def loss(weights: dict[str, Tensor], x: Tensor, counts: Tensor) -> Tensor:
        return (functional_call(model, weights, (x,)).float().square().sum() * counts).mean()

    with ampscope.watch(model, dir=folder, quiet=True):
        for step in range(STEPS):
            x, counts = torch.randn(8, 6).to(dtype), torch.ones(8)
            counts[0] = float(step < BAD)
            weights = {name: p.detach() for name, p in model.named_parameters()}
            each = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, counts)
            update = {
                name: (g / (g.flatten(1).norm(dim=1).view(-1, *[1] * (g.dim() - 1)) + 1e-8)).mean(0)
                for name, g in each.items()
            }
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.sub_(0.1 * update[name])
    return ampscope.diagnose(folder)


def test_an_eps_that_half_precision_lacks_between_gradients_of_samples_and_the_weights_is_told(
    run_folder: Path,
) -> None:
    assert told(private(run_folder, dtype=torch.float16))[:3] == (Cause.EPS_UNDERFLOW, BAD, "optimizer")


def test_the_same_in_a_dtype_that_holds_the_eps_is_healthy(run_folder: Path) -> None:
    assert private(run_folder, dtype=torch.float32).verdict is Verdict.HEALTHY
