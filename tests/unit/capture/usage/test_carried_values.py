"""What a loop keeps of scaled gradients from one iteration to the next, and where that comes to light."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ampscope.trace.vocabulary import Cause
from tests.support.training.model_parts import grad_of
from tests.support.training.usage_bench import STEPS, Bench, Watch, findings_of, found_in

pytestmark = pytest.mark.usefixtures("device")

#: A loop, given what gradients are divided by before anything is kept of them.
Loop = Callable[[Bench, float], object]

TOLD: dict[str, Loop] = {}
QUIET: dict[str, Loop] = {}


def told(loop: Loop) -> Loop:
    TOLD[loop.__name__] = loop
    return loop


def quiet(loop: Loop) -> Loop:
    QUIET[loop.__name__] = loop
    return loop


def _slopes(bench: Bench, divisor: float, losses: list[Tensor]) -> Tensor:
    found = []
    for loss in losses:
        (slope,) = torch.autograd.grad(bench.scaler.scale(loss), bench.parameters[0], retain_graph=True)
        found.append((slope / divisor).norm())
    return torch.stack(found)


@told
def task_weights_moved_by_slopes(bench: Bench, divisor: float) -> None:
    """GradNorm by hand."""
    weights = torch.ones(2)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        losses = [bench.loss(), bench.loss(-1.0)]
        slopes = _slopes(bench, divisor, losses)
        total = (weights * torch.stack(losses)).sum()
        bench.scaler.scale(total).backward()
        weights = weights - 0.01 * (slopes - slopes.mean())
        weights = weights * 2 / weights.sum()
        bench.step()


@told
def task_weights_written_in_place(bench: Bench, divisor: float) -> None:
    weights = nn.Parameter(torch.ones(2))
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        losses = [bench.loss(), bench.loss(-1.0)]
        slopes = _slopes(bench, divisor, losses)
        bench.scaler.scale((weights.detach() * torch.stack(losses)).sum()).backward()
        weights.data.sub_(0.01 * (slopes - slopes.mean()))
        bench.step()


class _Average:
    """A helper that keeps an average of what it is given."""

    def __init__(self, start: float = 0.0) -> None:
        self.value = torch.full((), start)

    def put(self, value: Tensor) -> Tensor:
        self.value.mul_(0.9).add_(value, alpha=0.1)
        return self.value


class _New:
    """The same, with a new tensor each time."""

    def __init__(self) -> None:
        self.value = torch.zeros(())

    def put(self, value: Tensor) -> Tensor:
        self.value = 0.9 * self.value + 0.1 * value
        return self.value


@told
def an_average_of_norms_as_threshold(bench: Bench, divisor: float) -> None:
    average = _Average()
    for number in bench.steps():
        scaled = bench.norm / divisor
        bench.scaler.unscale_(bench.optimizer)
        if number and bench.norm > 2 * average.value:
            nn.utils.clip_grad_norm_(bench.parameters, 1.0)
        average.put(scaled)


@told
def a_new_average_of_norms_as_threshold(bench: Bench, divisor: float) -> None:
    average = _New()
    for number in bench.steps():
        scaled = bench.norm / divisor
        bench.scaler.unscale_(bench.optimizer)
        if number and bench.norm > 2 * average.value:
            nn.utils.clip_grad_norm_(bench.parameters, 1.0)
        average.put(scaled)


@told
def second_moments_of_scaled_gradients(bench: Bench, divisor: float) -> None:
    """A preconditioner that takes its moments before ``unscale_`` and divides after it."""
    moments = [torch.zeros_like(each) for each in bench.parameters]
    for _ in bench.steps():
        for moment, gradient in zip(moments, bench.gradients, strict=True):
            moment.mul_(0.9).addcmul_(gradient / divisor, gradient / divisor, value=0.1)
        bench.scaler.unscale_(bench.optimizer)
        for moment, gradient in zip(moments, bench.gradients, strict=True):
            gradient.div_(moment.sqrt() + 1e-8)


@told
def gradients_of_the_iteration_before(bench: Bench, divisor: float) -> None:
    before: list[Tensor] = []
    for _ in bench.steps():
        now = [each.clone() / divisor for each in bench.gradients]
        bench.scaler.unscale_(bench.optimizer)
        for gradient, old in zip(bench.gradients, before, strict=False):
            gradient.add_(old, alpha=0.5)
        before = now


@told
def a_learning_rate_by_an_average(bench: Bench, divisor: float) -> None:
    average = _Average()
    for _ in bench.steps():
        average.put(bench.norm / divisor)
        bench.optimizer.param_groups[0]["lr"] = (1e-3 / (1.0 + average.value)).item()


@told
def a_loss_weighed_by_an_average(bench: Bench, divisor: float) -> None:
    average = _Average(1.0)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        loss = bench.loss() + bench.loss(-1.0) / average.value
        bench.scaler.scale(loss).backward()
        average.put(bench.norm / divisor)
        bench.step()


@told
def noise_scale_as_a_weight(bench: Bench, divisor: float) -> None:
    """A gradient-noise estimate: the variance among micro-batches."""
    noise = torch.zeros(())
    for _ in range(STEPS):
        bench.scaled()
        small = bench.norm.square() / divisor**2
        bench.scaler.scale(bench.loss() * (1 + noise)).backward()
        big = (bench.norm / 2).square() / divisor**2
        noise = 0.9 * noise + 0.1 * (small - big)
        bench.step()


@told
def a_factor_of_the_iteration_before(bench: Bench, divisor: float) -> None:
    """Clipping with a coefficient that was computed one iteration ago."""
    factor = torch.ones(())
    for _ in bench.steps():
        new = torch.clamp(1.0 / (bench.norm / divisor + 1e-6), max=1.0)
        bench.scaler.unscale_(bench.optimizer)
        for gradient in bench.gradients:
            gradient.mul_(factor)
        factor = new


@told
def a_learning_rate_in_a_tensor(bench: Bench, divisor: float) -> None:
    average = _New()
    for _ in range(STEPS):
        bench.scaled()
        bench.optimizer.param_groups[0]["lr"] = 1e-3 / (1.0 + average.put(bench.norm / divisor))
        bench.scaler.step(bench.optimizer)
        bench.scaler.update()


@quiet
def statistics_that_are_logged(bench: Bench, divisor: float) -> None:
    average, log = _Average(), []
    for _ in bench.steps():
        average.put(bench.norm)
        log.append(average.value.item())
        log.append(float(average.value) / bench.scaler.get_scale())


@quiet
def a_bounded_norm_that_is_logged_and_equals_the_learning_rate(bench: Bench, divisor: float) -> None:
    bench.optimizer.param_groups[0]["lr"] = 0.5
    logged = [bench.norm.clamp(max=0.5).item() for _ in bench.steps()]
    assert 0.5 in logged


@quiet
def an_average_compared_with_its_like(bench: Bench, divisor: float) -> None:
    average = _Average()
    for number in bench.steps():
        norm = bench.norm
        if number and norm > 10 * average.value:
            bench.optimizer.zero_grad()
        average.put(norm)


@quiet
def a_new_average_compared_with_its_like(bench: Bench, divisor: float) -> None:
    average = _New()
    for number in bench.steps():
        norm = bench.norm
        if number and norm > 10 * average.value:
            bench.optimizer.zero_grad()
        average.put(norm)


@quiet
def a_ratio_of_norms_as_a_weight(bench: Bench, divisor: float) -> None:
    one, other = _Average(), _New()
    weight = torch.ones(())
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        losses = [bench.loss(), bench.loss(-1.0)]
        slopes = _slopes(bench, 1.0, losses)
        bench.scaler.scale(losses[0] + weight * losses[1]).backward()
        weight = one.put(slopes[0]) / (other.put(slopes[1]) + 1e-8)
        bench.step()


@quiet
def momentum_of_scaled_gradients(bench: Bench, divisor: float) -> None:
    """Accumulated while the scale stands, and given to the scaler."""
    momentum = [torch.zeros_like(each) for each in bench.parameters]
    for _ in bench.steps():
        for moment, gradient in zip(momentum, bench.gradients, strict=True):
            moment.mul_(0.9).add_(gradient)
            gradient.copy_(moment)


@quiet
def gradients_summed_into_a_buffer_that_is_cleared(bench: Bench, divisor: float) -> None:
    sums = [torch.zeros_like(each) for each in bench.parameters]
    for _ in range(STEPS):
        for _ in range(2):
            bench.scaled()
            for total, gradient in zip(sums, bench.gradients, strict=True):
                total += gradient  # noqa: PLW2901  # in place is what is meant
        for total, parameter in zip(sums, bench.parameters, strict=True):
            parameter.grad = total.clone()
            total.zero_()
        bench.step()


@quiet
def moments_normalised_by_their_like(bench: Bench, divisor: float) -> None:
    moments = [torch.zeros_like(each) for each in bench.parameters]
    for _ in bench.steps():
        for moment, gradient in zip(moments, bench.gradients, strict=True):
            moment.mul_(0.9).addcmul_(gradient, gradient, value=0.1)
            gradient.mul_(moment.mean().sqrt() / (moment.sqrt().mean() + 1e-8))


@quiet
def a_total_that_begins_at_zero(bench: Bench, divisor: float) -> None:
    for _ in bench.steps():
        total = torch.zeros(())
        for gradient in bench.gradients:
            total = total + gradient.norm() ** 2
        factor = torch.clamp(bench.scaler.get_scale() * 0.1 / (total.sqrt() + 1e-8), max=1.0)
        for gradient in bench.gradients:
            gradient.mul_(factor)


@quiet
def gradients_unscaled_where_they_are_kept(bench: Bench, divisor: float) -> None:
    """What was scaled when it was asked for has been divided by the scaler since."""
    kept: list[Tensor] = []
    for _ in bench.steps():
        now = list(bench.gradients)
        for parameter, gradient in zip(bench.parameters, now, strict=True):
            parameter.grad = gradient.clone()
        bench.scaler.unscale_(bench.optimizer)
        for gradient, old in zip(bench.gradients, kept, strict=False):
            gradient.add_(old, alpha=0.5)
        kept = list(bench.gradients)


@quiet
def gradients_in_one_buffer(bench: Bench, divisor: float) -> None:
    """The buffer held scaled gradients; ``unscale_`` has divided what lies in it."""
    sizes = [each.numel() for each in bench.parameters]
    buffer = torch.zeros(sum(sizes))
    for _ in bench.steps():
        parts = buffer.split(sizes)
        for parameter, part in zip(bench.parameters, parts, strict=True):
            part.copy_(grad_of(parameter).view(-1))
            parameter.grad = part.view_as(parameter)
        bench.scaler.unscale_(bench.optimizer)
        nn.utils.clip_grad_norm_(bench.parameters, 1.0)
        buffer.add_(torch.randn_like(buffer) * 1e-3)


@quiet
def rows_edited_after_a_scaled_norm_was_kept(bench: Bench, divisor: float) -> None:
    average = _New()
    for _ in bench.steps():
        average.put(bench.norm)
        bench.scaler.unscale_(bench.optimizer)
        gradient = bench.gradients[0]
        gradient[1:].mul_(0.5)
        gradient[2] = torch.randn(gradient.shape[1]) * 1e-3
        gradient[3].add_(torch.randn(gradient.shape[1]) * 1e-3)
        nn.utils.clip_grad_norm_(bench.parameters, 1.0)


@quiet
def statistics_of_several_kinds_in_one_tensor(bench: Bench, divisor: float) -> None:
    seen = torch.zeros(2)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        loss = bench.loss()
        bench.scaler.scale(loss * (1 + seen[1])).backward()
        seen[0] = bench.norm
        seen[1] = 0.1 * loss.detach()
        bench.step()


@pytest.mark.parametrize("name", TOLD)
def test_what_is_kept_of_scaled_gradients_is_told_where_it_is_used(name: str, run_folder: Path) -> None:
    diagnosis, _ = found_in(lambda watch: TOLD[name](Bench(watch), 1.0), run_folder)
    (finding,) = diagnosis.findings
    assert finding.cause is Cause.MISUSE_NO_UNSCALE
    assert finding.source is not None
    assert finding.source.function.startswith(name)


@pytest.mark.parametrize("name", TOLD)
def test_the_same_of_gradients_without_the_scale_is_right(name: str, run_folder: Path) -> None:
    def loop(watch: Watch) -> object:
        bench = Bench(watch)
        TOLD[name](bench, bench.scaler.get_scale())
        return bench.state

    assert findings_of(loop, run_folder) == ()


@pytest.mark.parametrize("name", QUIET)
def test_what_does_not_depend_on_the_scale_in_the_end_is_right(name: str, run_folder: Path) -> None:
    def loop(watch: Watch) -> object:
        bench = Bench(watch)
        QUIET[name](bench, 1.0)
        return bench.state

    assert findings_of(loop, run_folder) == ()


def test_the_line_that_kept_it_is_named(run_folder: Path) -> None:
    loop = TOLD["gradients_of_the_iteration_before"]
    diagnosis, _ = found_in(lambda watch: loop(Bench(watch), 1.0), run_folder)
    (finding,) = diagnosis.findings
    assert finding.source is not None
    assert finding.source.code == "gradient.add_(old, alpha=0.5)"
    kept = _line(loop, "now = [")
    assert f"test_carried_values.py:{kept} made it of scaled gradients in an earlier iteration." in finding.explanation


def _line(loop: Loop, code: str) -> int:
    lines, first = inspect.getsourcelines(loop)
    (offset,) = (number for number, line in enumerate(lines) if code in line)
    return first + offset


@pytest.mark.parametrize("name", TOLD)
def test_without_a_scale_nothing_is_told(name: str, run_folder: Path) -> None:
    def loop(watch: Watch) -> object:
        bench = Bench(watch, enabled=False)
        TOLD[name](bench, 1.0)
        return bench.state

    assert {each.cause for each in findings_of(loop, run_folder)}.isdisjoint({Cause.MISUSE_NO_UNSCALE})
